"""Transfers on paper: pages, slots and files hold token ids, and jobs end when a test says so."""

from megaspan.cache.jobs import Backup, Restore, RestoreFailed, Source
from megaspan.cache.pool import PagePools

Content = bytes | None  # the token ids of a page and all before it; None: poison


class PaperDisk:
    """Files by their key."""

    generation = 0

    def __init__(self):
        self.files: dict[bytes, Content] = {}

    def has(self, key: bytes) -> bool:
        return key in self.files

    def capacity(self, token_bytes: int) -> int:
        return 12

    def touch(self, keys) -> None:
        list(keys)


class PaperTransfers:
    """Stands in for Transfers. Copies are made when a job ends: a page given away before is then wrong."""

    timeout = 1.0
    staged_pages = 3

    def __init__(self, pools: PagePools, disk: PaperDisk):
        self.device: dict[int, Content] = dict.fromkeys(range(pools.total_pages))
        self.host: dict[int, Content] = {}
        self.disk = disk
        self.open: list[Backup | Restore] = []
        self.stalled = self.backups_stalled = False
        self.generation = 0
        self._ended: list[Backup | Restore] = []
        give = pools.give

        def poisoning(pages):
            give(pages)
            self.device.update(dict.fromkeys(pages))

        pools.give = poisoning

    def backup(self, pages, slots, entries=()) -> Backup:
        self.open.append(job := Backup(pages, slots, entries, self.generation))
        return job

    def save(self, slot, key, tokens, generation) -> None:
        self.disk.files[key] = self.host[slot]

    def flush_saves(self, seconds: float) -> bool:
        while backups := [number for number, job in enumerate(self.open) if isinstance(job, Backup)]:
            self.finish(backups[0])
        return True

    def clear_disk(self) -> None:
        self.disk.files.clear()
        self.generation += 1

    def restore(self, sources, pages) -> Restore:
        self.open.append(job := Restore(sources, pages, {}, self.timeout))
        return job

    def finished(self) -> list[Backup | Restore]:
        ended, self._ended = self._ended, []
        return ended

    def finish(self, number: int, works: bool = True) -> None:
        """End an open job: all that it was to copy is copied at this moment, or poison where it fails."""
        job = self.open.pop(number)
        if isinstance(job, Backup):
            self._back_up(job, works)
        else:
            self._restore(job, works)
        if not works:
            job.fail(RestoreFailed("injected"))
        job.done = True
        self._ended.append(job)

    def _back_up(self, job: Backup, works: bool) -> None:
        for page, slot in zip(job.pages, job.slots, strict=True):
            self.host[slot] = self.device[page] if works else None
        for page, (key, _) in zip(job.pages, job.entries, strict=True):
            if works and job.generation == self.generation:
                self.disk.files[key] = self.device[page]

    def _restore(self, job: Restore, works: bool) -> None:
        for usable, (source, page) in enumerate(zip(job.sources, job.pages, strict=True)):
            if not self._is_there(source):
                job.stage(usable)
                return
            there = self.host[source.slot] if source.on_host else self.disk.files[source.key]
            self.device[page] = there if works else None
        job.stage(len(job.pages))

    def _is_there(self, source: Source) -> bool:
        return source.on_host or source.key in self.disk.files
