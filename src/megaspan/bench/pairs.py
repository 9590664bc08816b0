"""Two things measured in turns, so that what the machine does meanwhile befalls both."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

PAIRS = 5


@dataclass(frozen=True)
class Pairs:
    """What was measured of the one and of the other, in the order of the pairs."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median over the pairs of second ÷ first."""
        return median(self._ratios())

    def spread(self) -> str:
        low, high = min(self._ratios()), max(self._ratios())
        return f"median of {len(self.first)} pairs, {low:.3g} to {high:.3g}"

    def _ratios(self) -> list[float]:
        return [second / first for first, second in zip(self.first, self.second, strict=True)]


def in_turns(
    first: Callable[[], float], second: Callable[[], float], say: Callable[[str], None], pairs: int = PAIRS
) -> Pairs:
    """Call both `pairs` times, the second one first in every other pair: a drift favours neither."""
    seen: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            seen[which].append((first, second)[which]())
        say(f"pair {number + 1} of {pairs}: {seen[0][-1]:.3g} and {seen[1][-1]:.3g}")
    return Pairs(tuple(seen[0]), tuple(seen[1]))
