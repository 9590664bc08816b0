"""What an engine is doing, in numbers."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot. Pages: total = free + cached + locked. Hits count tokens. `_total`: since the start."""

    running: int
    waiting: int
    loading: int
    preempted_total: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_locked: int
    host_pages_total: int
    host_pages_used: int
    disk_pages_used: int
    prefix_queries_total: int
    prefix_hits_total: int
    host_hits_total: int
    failed_restores_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_total: dict[str, int]
    steps_total: int
    tokens_per_second: float
    weights_version: str


class Rate:
    """Events per second over the last few seconds."""

    def __init__(self, window: float = 5.0):
        self.window = window
        self._events: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        self._events.append((now, count))
        while self._events[0][0] < now - self.window:
            self._events.popleft()

    def at(self, now: float) -> float:
        """May be called from any thread: it changes nothing."""
        events = list(self._events)
        return sum(count for when, count in events if when >= now - self.window) / self.window


@dataclass
class Counters:
    """Totals since the start, kept by the engine."""

    preempted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    requests: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
