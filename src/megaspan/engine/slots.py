"""The running requests' state that every step needs, in arrays: a step updates it and never rebuilds it."""

import numpy as np

from megaspan.engine.request import Request


class Slots:
    """Arrays of `count` slots.

    cached: tokens with rows in the cache. room: tokens that the assigned pages hold. last: the newest token,
    not yet read. drawn: tokens drawn so far. limit: how many may be. stops: ids that end it, -1 padded.
    special: whether the drawn token needs more than these arrays (a grammar, stop strings, many stop ids).
    """

    STOPS = 8  # ids a slot holds here; a request with more of them is special

    def __init__(self, count: int):
        self.free = list(range(count - 1, -1, -1))
        self.requests: list[Request | None] = [None] * count
        self.cached = np.zeros(count, dtype=np.int64)
        self.room = np.zeros(count, dtype=np.int64)
        self.last = np.zeros(count, dtype=np.int64)
        self.drawn = np.zeros(count, dtype=np.int64)
        self.limit = np.zeros(count, dtype=np.int64)
        self.stops = np.full((count, self.STOPS), -1, dtype=np.int64)
        self.special = np.zeros(count, dtype=bool)
        self.is_decoding = np.zeros(count, dtype=bool)
        self._decoding: np.ndarray | None = None

    def enter(self, request: Request) -> int:
        slot = request.slot = self.free.pop()
        self.requests[slot] = request
        self.cached[slot] = request.computed
        self.room[slot] = 0
        self.drawn[slot] = request.generated
        self.limit[slot] = request.max_tokens
        stop_ids = request.stop_ids
        self.stops[slot] = -1
        self.stops[slot, : min(len(stop_ids), self.STOPS)] = stop_ids[: self.STOPS]
        special = request.grammar is not None or request.stops is not None or len(stop_ids) > self.STOPS
        self.special[slot] = special
        return slot

    def leave(self, request: Request) -> None:
        slot, request.slot = request.slot, -1
        self.requests[slot] = None
        self.set_decoding(slot, False)
        self.free.append(slot)

    def set_decoding(self, slot: int, decoding: bool) -> None:
        if self.is_decoding[slot] != decoding:
            self.is_decoding[slot] = decoding
            self._decoding = None

    @property
    def decoding(self) -> np.ndarray:
        """The slots that draw a token each step, ascending; worked out anew only when one joins or leaves."""
        if self._decoding is None:
            self._decoding = np.flatnonzero(self.is_decoding)
        return self._decoding
