"""Whether loading a page is faster than computing it."""

FORGETTING = 0.05  # of what sets the estimate apart from the prior, at each refusal


class RestorePolicy:
    """Estimates seconds per byte of restores: a moving average of those that finished.

    prior: bytes per second before any was measured. weight: of the newest measurement in the average.
    A refusal moves the estimate a little back to the prior, for else one slow restore, never followed
    by another, would be the last.
    """

    def __init__(self, prior: float = 1e9, weight: float = 0.3):
        self._prior = self._seconds_per_byte = 1 / prior
        self._weight = weight

    def measured(self, nbytes: int, seconds: float) -> None:
        """A restore of so many bytes took so long."""
        if nbytes > 0 and seconds > 0:
            self._approach(seconds / nbytes, self._weight)

    def worth(self, nbytes: int, recompute_seconds: float) -> bool:
        """Whether to load so many bytes rather than to compute them in so many seconds."""
        worth = nbytes * self._seconds_per_byte < recompute_seconds
        if not worth:
            self._approach(self._prior, FORGETTING)
        return worth

    def _approach(self, seconds_per_byte: float, weight: float) -> None:
        self._seconds_per_byte += weight * (seconds_per_byte - self._seconds_per_byte)
