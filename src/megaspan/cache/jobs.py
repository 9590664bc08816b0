"""Jobs that move pages between the tiers, and the marks that readers of a restored layer wait for."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Source:
    """Where a page is restored from: a host slot, or else the disk.

    key: the chain hash that names it on the disk. tokens: its token ids (int32 bytes), which must agree.
    """

    slot: int = -1
    key: bytes = b""
    tokens: bytes = b""

    @property
    def on_host(self) -> bool:
        return self.slot >= 0


class RestoreFailed(RuntimeError):
    """A restored layer is not there and will not come: compute its rows again."""


class Job:
    """Work for a transfer thread. Its pages and slots belong to the thread until `done` (the ack).

    error: what went wrong, at the latest when done. seconds: how long the thread worked on it.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.done = False
        self.seconds = 0.0
        self.submitted: Any = None  # on CUDA: the event before which the engine still uses its pages
        self._changed = threading.Condition()
        self._claimed = False

    def fail(self, error: Exception) -> None:
        """Record the first error. The job is done when the thread lets go, before its next segment."""
        with self._changed:
            if not self.done:
                self.error = self.error or error
            self._changed.notify_all()

    def abort(self) -> None:
        """Nobody wants this any more. The pages stay the thread's until the ack all the same."""
        self.fail(RestoreFailed("aborted"))

    def claim(self) -> bool:
        """True for the first caller only: it runs the job, or withdraws it, and acknowledges it."""
        with self._changed:
            first, self._claimed = not self._claimed, True
        return first


class Backup(Job):
    """Copy device `pages` to host `slots`, then give the disk copies under `entries`: (key, tokens).

    generation: the disk's when the job was made; what it has is not for a disk that was cleared since.
    """

    def __init__(
        self,
        pages: Sequence[int],
        slots: Sequence[int],
        entries: Sequence[tuple[bytes, bytes]] = (),
        generation: int = 0,
    ):
        super().__init__()
        self.pages, self.slots, self.entries = list(pages), list(slots), list(entries)
        self.generation = generation


class Save(Job):
    """Write a page to the disk. payload: a copy of its bytes, so that the host slot may go."""

    def __init__(self, key: bytes, tokens: bytes, payload: bytes, generation: int):
        super().__init__()
        self.key, self.tokens, self.payload, self.generation = key, tokens, payload, generation


class RemoveFiles(Job):
    """Remove what a cleared disk tier has left in its folder."""


class Restore(Job):
    """Fill device `pages` from `sources`, layer by layer.

    last_segment: for each layer the number of the last segment that holds rows of it, in any pool.
    timeout: seconds after which a wait gives up. staged: all sources are in memory. usable: how many leading
    pages will be good in every pool, once staged; those behind them are left as they are.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        pages: Sequence[int],
        last_segment: Mapping[int, int],
        timeout: float,
    ):
        super().__init__()
        self.sources, self.pages = list(sources), list(pages)
        self.staged = all(source.on_host for source in self.sources)
        self.usable = len(self.pages) if self.staged else 0
        self._last_segment = last_segment
        self._timeout = timeout
        self._copied = 0  # segments, in order
        self._events: list[torch.cuda.Event] = []  # on CUDA: the end of each segment's copy

    def ready(self, layer: int) -> bool:
        """Whether the layer's rows of both pools are there, so that `wait` returns at once."""
        last = self._last_segment[layer]
        if self.error or self._copied <= last:
            return False
        return last >= len(self._events) or self._events[last].query()

    @property
    def all_copied(self) -> bool:
        """Whether no layer is missing, as after a pass that waited for each of them."""
        return not self.error and self._copied > max(self._last_segment.values(), default=-1)

    def wait(self, layer: int) -> None:
        """Block until the layer's rows of both pools are there (on CUDA: make the current stream wait).

        Raises RestoreFailed when the restore has failed, or does not get there within `timeout` seconds;
        a restore that was given up stays failed.
        """
        last = self._last_segment[layer]
        with self._changed:
            if not self._changed.wait_for(lambda: self.error or self._copied > last, self._timeout):
                self.error = RestoreFailed(f"layer {layer} did not arrive within {self._timeout:g} s")
            if self.error:
                raise RestoreFailed(
                    f"a restore of {len(self.pages)} pages failed: {self.error}"
                ) from self.error
        if last < len(self._events):
            torch.cuda.current_stream().wait_event(self._events[last])

    def stage(self, usable: int) -> None:
        """The thread has the first `usable` pages in memory."""
        self.usable, self.staged = usable, True

    def mark(self, segments: int, event: torch.cuda.Event | None = None) -> None:
        """The thread has copied the first `segments` segments."""
        if event is not None:
            self._events.append(event)
        with self._changed:
            self._copied = segments
            self._changed.notify_all()
