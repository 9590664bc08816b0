"""Transfers between device, host and disk, off the engine's thread."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megaspan.cache.host import HostTier
from megaspan.cache.jobs import Backup, Job, RemoveFiles, Restore, RestoreFailed, Save, Source
from megaspan.cache.worker import Worker
from megaspan.ops.page_copy import PageCopy

if TYPE_CHECKING:
    from megaspan.cache.disk import DiskTier
    from megaspan.cache.pool import Segment

UNSAVED_BYTES = 1 << 30  # copies of pages that wait for the disk
STAGED_BYTES = 64 << 20  # copies that a thread holds of the pages it moves, for each of two stages


class Transfers:
    """Three threads, each with its jobs in the order they came: backups, saves to the disk, restores.

    A copy goes segment by segment over all pages of the job, in the order in which a forward pass reads
    them, so that a pass can begin when the first layer is there. Jobs are submitted and acknowledged on
    one thread, the engine's. A page or slot of a job may not be reused before `finished` has returned it.

    segments: what one page consists of. timeout: seconds without progress after which a restore is given up.
    before_segment: called by the thread before each segment's copy; tests make it sleep or raise.
    """

    def __init__(
        self,
        segments: Sequence["Segment"],
        host: HostTier,
        disk: "DiskTier | None" = None,
        timeout: float = 30.0,
        before_segment: Callable[[Backup | Restore, "Segment"], None] | None = None,
    ):
        self.segments, self.host, self.disk, self.timeout = list(segments), host, disk, timeout
        self.unsaved_pages = 0  # not written because the disk was too slow
        self.before_segment = before_segment
        self._last_segment = {segment.layer: number for number, segment in enumerate(self.segments)}
        self._device = self.segments[0].pages.device
        self._device_pages = [host.words(segment.pages) for segment in self.segments]
        host_pages = host.columns(host.memory)
        self._to_host = PageCopy(self._device_pages, host_pages)
        self._from_host = PageCopy(host_pages, self._device_pages)
        self._finished: deque[Backup | Restore] = deque()
        self._unfinished: set[Backup | Restore] = set()  # not yet returned by `finished`
        self._open = self._saving = 0  # jobs; those of them that are no restores
        self._unsaved_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._backups = Worker("backups", self._device, self._back_up, self._acknowledge)
        self._saves = Worker("saves", torch.device("cpu"), self._save, self._acknowledge)
        self._restoring = Worker("restores", self._device, self._restore, self._acknowledge)

    def backup(
        self,
        pages: Sequence[int],
        slots: Sequence[int],
        entries: Sequence[tuple[bytes, bytes]] = (),
    ) -> Backup:
        """Copy device pages to host slots.

        entries: the (key, tokens) under which the disk, if there is one, is to have the pages as well. It
        gets copies of them: the ack does not wait for the disk, and pages that a slow disk cannot keep up
        with (more than UNSAVED_BYTES wait) are not written.
        """
        if len(pages) != len(slots) or (entries and len(entries) != len(pages)):
            raise ValueError(f"{len(pages)} pages do not fit {len(slots)} slots and {len(entries)} entries")
        job = Backup(pages, slots)
        if self.disk is not None:
            job.entries, job.generation = list(entries), self.disk.generation
        self._unfinished.add(job)
        self._submit(self._backups, job)
        return job

    def restore(self, sources: Sequence[Source], pages: Sequence[int]) -> Restore:
        """Fill device pages from host slots and disk pages. Those on the disk are read and checked before
        they are copied, STAGED_BYTES of them at a time."""
        if len(sources) != len(pages):
            raise ValueError(f"{len(sources)} sources cannot fill {len(pages)} pages")
        job = Restore(sources, pages, self._last_segment, self.timeout)
        if self.stalled:
            job.fail(RestoreFailed("the restoring thread hangs"))
        self._unfinished.add(job)
        self._submit(self._restoring, job)
        return job

    @property
    def stalled(self) -> bool:
        """The restoring thread has made no progress for `timeout` seconds: loading is not worth a try."""
        return self._restoring.silent_seconds() > self.timeout

    @property
    def backups_stalled(self) -> bool:
        """The thread of the backups has made no progress for `timeout` seconds."""
        return self._backups.silent_seconds() > self.timeout

    def finished(self) -> list[Backup | Restore]:
        """Jobs acknowledged since the last call; never blocks. Gives up those that do not get on."""
        stalled = {Backup: self.backups_stalled, Restore: self.stalled}
        for job in self._unfinished:
            if stalled[type(job)]:
                job.fail(RestoreFailed(f"no progress within {self.timeout:g} s"))
        for job in [job for job in self._unfinished if job.error and job.claim()]:
            self._acknowledge(job)  # no thread has touched it, so it need not wait for its turn
        jobs = [self._finished.popleft() for _ in range(len(self._finished))]
        self._unfinished.difference_update(jobs)
        return jobs

    def save(self, slot: int, key: bytes, tokens: bytes, generation: int) -> None:
        """Give the disk a copy of what is in a host slot, unless too much waits for it already."""
        assert self.disk is not None
        if self.disk.has(key):
            return
        with self._changed:
            if self._unsaved_bytes + self.host.page_bytes > UNSAVED_BYTES:
                self.unsaved_pages += 1
                return
            self._unsaved_bytes += self.host.page_bytes
        payload = self.host.memory[slot].numpy().tobytes()
        self._submit(self._saves, Save(key, tokens, payload, generation))

    def clear_disk(self) -> None:
        """Forget what is on the disk and on its way there. Does not wait for the disk."""
        if self.disk is not None:
            self.disk.clear()
            self._submit(self._saves, RemoveFiles())

    def flush(self, seconds: float) -> bool:
        """Wait until no job is open and all is on the disk, at most so long; whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, seconds)

    def flush_saves(self, seconds: float) -> bool:
        """The same, though restores may go on, or hang."""
        with self._changed:
            return self._changed.wait_for(lambda: self._saving == 0, seconds)

    def close(self) -> None:
        """Stop the threads: open jobs fail and are acknowledged when their thread has let go of them.

        Pages that still wait for the disk are lost: `flush` first to keep them. A thread that hangs for more
        than a second is left behind.
        """
        workers = (self._restoring, self._backups, self._saves)
        with self._changed:
            self._closed = True
            for worker in workers:
                worker.stop()
        for worker in workers:
            worker.join(1.0)

    def _submit(self, worker: Worker, job: Job) -> None:
        with self._changed:
            self._open += 1
            self._saving += not isinstance(job, Restore)
            if not self._closed:
                return worker.submit(job)
        job.fail(RestoreFailed("the transfers are closed"))
        if job.claim():
            self._acknowledge(job)

    def _acknowledge(self, job: Job) -> None:
        job.done = True
        with self._changed:
            if isinstance(job, Backup | Restore):
                self._finished.append(job)
            if isinstance(job, Save):
                self._unsaved_bytes -= len(job.payload)
            self._open -= 1
            self._saving -= not isinstance(job, Restore)
            self._changed.notify_all()

    def _begin_segments(self, worker: Worker, job: Backup | Restore, numbers: range) -> None:
        for number in numbers:
            worker.progress(job)
            if self.before_segment is not None:
                self.before_segment(job, self.segments[number])

    def _back_up(self, job: Backup) -> None:
        pages, slots = self._to_host.numbers(job.pages, job.slots)
        for numbers in self._in_order([(self._to_host, pages, slots)]):
            self._begin_segments(self._backups, job, numbers)
            self._to_host.copy(numbers, pages, slots, STAGED_BYTES, self._backups.keep_pace)
        if (copied := self._backups.event()) is not None:
            copied.synchronize()
        for slot, (key, tokens) in zip(job.slots, job.entries, strict=False):
            self.save(slot, key, tokens, job.generation)

    def _save(self, job: Save | RemoveFiles) -> None:
        assert self.disk is not None
        if isinstance(job, RemoveFiles):
            self.disk.remove_unlisted()
        else:
            self.disk.write(job.key, job.tokens, job.payload, job.generation)

    def _restore(self, job: Restore) -> None:
        """Copy the pages, those from the disk group by group: a long prefix must not take its bytes twice.

        Which of them are good is known when the last group has been read; its copy completes the layers.
        """
        groups = self._groups(job.sources)
        on_disk = sum(not source.on_host for source in job.sources)
        staged = torch.empty(min(on_disk, self.staged_pages), self.host.page_bytes, dtype=torch.uint8)
        for first, stop in groups:
            good = self._read(job, first, stop, staged)
            is_last = good < stop or stop == len(job.sources)
            if is_last:
                job.stage(good)
            self._copy_group(job, self._parts(job, first, good, staged), is_last)
            if is_last:
                return

    @property
    def staged_pages(self) -> int:
        """How many pages may be copied at once."""
        return max(1, STAGED_BYTES // self.host.page_bytes)

    def _groups(self, sources: Sequence[Source]) -> list[tuple[int, int]]:
        """(first, stop) of runs of sources; the disk pages of each may be in memory at once."""
        on_disk = [number for number, source in enumerate(sources) if not source.on_host]
        starts = on_disk[self.staged_pages :: self.staged_pages]
        return list(pairwise([0, *starts, len(sources)]))

    def _read(self, job: Restore, first: int, stop: int, staged: Tensor) -> int:
        """Read the group's disk pages into staged [N, page_bytes]; return the first bad source, or `stop`."""
        count = 0
        for number in range(first, stop):
            source = job.sources[number]
            if source.on_host:
                continue
            self._restoring.progress(job)
            payload = self.disk.read(source.key, source.tokens) if self.disk is not None else None
            if payload is None:
                return number
            staged[count].numpy()[:] = np.frombuffer(payload, np.uint8)
            count += 1
        return stop

    def _parts(
        self, job: Restore, first: int, stop: int, staged: Tensor
    ) -> list[tuple[PageCopy, Tensor, Tensor]]:
        """What copies, from the host and from what is staged; which packed pages [P]; into which [P]."""
        on_host = [number for number in range(first, stop) if job.sources[number].on_host]
        on_disk = [number for number in range(first, stop) if not job.sources[number].on_host]
        slots = [job.sources[number].slot for number in on_host]
        from_staged = PageCopy(self.host.columns(staged), self._device_pages)
        return [
            (copy, *copy.numbers(rows, [job.pages[number] for number in numbers]))
            for copy, rows, numbers in (
                (self._from_host, slots, on_host),
                (from_staged, range(len(on_disk)), on_disk),
            )
            if numbers
        ]

    def _copy_group(self, job: Restore, parts: list[tuple[PageCopy, Tensor, Tensor]], is_last: bool) -> None:
        for numbers in self._in_order(parts):
            self._begin_segments(self._restoring, job, numbers)
            for copy, rows, pages in parts:
                copy.copy(numbers, rows, pages, STAGED_BYTES, self._restoring.keep_pace)
            if is_last:
                event = self._restoring.event()
                for number in numbers:
                    job.mark(number + 1, event)

    def _in_order(self, parts: list[tuple[PageCopy, Tensor, Tensor]]) -> Iterator[range]:
        """The segments in order, as many at once as all of the copies should take."""
        count = min((copy.segments_at_once(len(pages)) for copy, pages, _ in parts), default=1)
        for first in range(0, len(self.segments), count):
            yield range(first, min(first + count, len(self.segments)))
