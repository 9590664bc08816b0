"""Transfers between device, host and disk, off the engine's thread."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megaspan.cache.host import HostTier
from megaspan.cache.jobs import Backup, Job, Restore, RestoreFailed, Save, Source
from megaspan.cache.restore_policy import RestorePolicy
from megaspan.cache.worker import Worker

if TYPE_CHECKING:
    from megaspan.cache.disk import DiskTier
    from megaspan.cache.pool import Segment

__all__ = ["Backup", "Restore", "RestoreFailed", "RestorePolicy", "Source", "Transfers"]

UNSAVED_BYTES = 1 << 30  # copies of pages that wait for the disk


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
        self._host_pages = host.columns(host.memory)
        self._finished: deque[Backup | Restore] = deque()
        self._unfinished: set[Backup | Restore] = set()  # not yet returned by `finished`
        self._open = 0  # jobs
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
        job = Backup(pages, slots, entries if self.disk is not None else ())
        self._unfinished.add(job)
        self._submit(self._backups, job)
        return job

    def restore(self, sources: Sequence[Source], pages: Sequence[int]) -> Restore:
        """Fill device pages from host slots and disk pages. Pages on the disk are read and checked before the
        copy begins, all of the job at once: they take as much memory as they have bytes."""
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

    def flush(self, seconds: float) -> bool:
        """Wait until no job is open and all is on the disk, at most so long; whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, seconds)

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
            self._changed.notify_all()

    def _begin_segment(self, worker: Worker, job: Backup | Restore, segment: "Segment") -> None:
        worker.progress(job)
        if self.before_segment is not None:
            self.before_segment(job, segment)

    def _back_up(self, job: Backup) -> None:
        pages = torch.tensor(job.pages, device=self._device)
        slots = torch.tensor(job.slots)
        for number, segment in enumerate(self.segments):
            self._begin_segment(self._backups, job, segment)
            rows = self._device_pages[number].index_select(0, pages)
            self._host_pages[number].index_copy_(0, slots, rows.cpu())
        for slot, (key, tokens) in zip(job.slots, job.entries, strict=False):
            self._queue_save(slot, key, tokens)

    def _queue_save(self, slot: int, key: bytes, tokens: bytes) -> None:
        assert self.disk is not None
        if self.disk.has(key):
            return
        with self._changed:
            if self._unsaved_bytes + self.host.page_bytes > UNSAVED_BYTES:
                self.unsaved_pages += 1
                return
            self._unsaved_bytes += self.host.page_bytes
        self._submit(self._saves, Save(key, tokens, self.host.memory[slot].numpy().tobytes()))

    def _save(self, job: Save) -> None:
        assert self.disk is not None
        self.disk.write(job.key, job.tokens, job.payload)

    def _restore(self, job: Restore) -> None:
        parts = self._stage(job)
        for number, segment in enumerate(self.segments):
            self._begin_segment(self._restoring, job, segment)
            for columns, rows, pages in parts:
                _copy_rows(columns[number].index_select(0, rows), self._device_pages[number], pages)
            job.mark(number + 1, self._restoring.event())

    def _stage(self, job: Restore) -> list[tuple[list[Tensor], Tensor, Tensor]]:
        """What to copy: packed pages by segment, words [N, B]; which of them, [P]; into which pages, [P]."""
        read, usable = self._read(job)
        job.stage(usable)
        on_host = [number for number in range(usable) if job.sources[number].on_host]
        on_disk = [number for number in range(usable) if not job.sources[number].on_host]
        slots = [job.sources[number].slot for number in on_host]
        return [
            (
                columns,
                torch.tensor(rows),
                torch.tensor([job.pages[number] for number in numbers]).to(self._device),
            )
            for columns, rows, numbers in (
                (self._host_pages, slots, on_host),
                (self.host.columns(read), range(len(on_disk)), on_disk),
            )
            if numbers
        ]

    def _read(self, job: Restore) -> tuple[Tensor, int]:
        """The job's disk pages, uint8 [N, page_bytes]; how many sources come before the first bad one."""
        wanted = sum(not source.on_host for source in job.sources)
        memory = torch.empty(wanted, self.host.page_bytes, dtype=torch.uint8)
        count = 0
        for number, source in enumerate(job.sources):
            if source.on_host:
                continue
            self._restoring.progress(job)
            payload = self.disk.read(source.key, source.tokens) if self.disk is not None else None
            if payload is None:
                return memory, number
            memory[count].numpy()[:] = np.frombuffer(payload, np.uint8)
            count += 1
        return memory, len(job.sources)


def _copy_rows(rows: Tensor, pages: Tensor, numbers: Tensor) -> None:
    """Set `pages[numbers]`, words [N, B] and [P], to `rows` [P, B] of host memory; on CUDA in this stream."""
    if pages.is_cuda:
        rows = rows.pin_memory().to(pages.device, non_blocking=True)
    pages.index_copy_(0, numbers, rows)
