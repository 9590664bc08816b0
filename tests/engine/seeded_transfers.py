"""Transfers that come late or fail, as a seed says, and at the same moments each time it is given.

Threads would make every run another. So wherever the engine could tell how far they have come, it first
waits until each has gone as far as it may: to the end of its jobs, or to a segment where its job is held
for a number of polls. A pass that reads a layer whose rows are held lets them go as it starts, and the
transfer runs beside it.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megaspan.cache.jobs import Backup, Restore
from megaspan.engine.engine import Engine

MOST_POLLS = 20  # that a job is held
BOUND = 60.0  # seconds in which every transfer gets on
DISK_FAULTS = ("raised", "removed", "cut", "changed")


@dataclass(frozen=True)
class Plan:
    """What happens to a job before it copies the segment: it fails, or it is held until that poll."""

    segment: Any
    fails: bool
    until: int


class SeededTransfers:
    """Takes over an engine's transfers. rate: the share of jobs that are held; a fifth as many fail.

    counts: what was done to them, and pages by where they were restored from.
    """

    def __init__(self, engine: Engine, seed: int, rate: float):
        assert engine.memory.tiers is not None
        self.transfers, self.seed, self.rate = engine.memory.tiers.transfers, seed, rate
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._reads: Counter[bytes] = Counter()  # of each page on the disk
        self._jobs: dict[type, deque[Any]] = {
            Backup: deque(),
            Restore: deque(),
        }  # not yet seen done, in order
        self._plans: dict[Any, Plan] = {}
        self._held: dict[Any, int] = {}  # until which poll
        self._polls = 0
        self._changed = threading.Condition()
        self._take_over(engine, engine.memory.tiers.disk)

    def _take_over(self, engine: Any, disk: Any) -> None:
        transfers: Any = self.transfers
        for kind in (Backup, Restore):
            name = kind.__name__.lower()
            setattr(transfers, name, partial(self._submit, kind, getattr(transfers, name)))
        transfers.before_segment = self._before_segment
        if disk is not None:
            disk.read = partial(self._read, disk, disk.read)
            disk.write = partial(self._write, disk.write)
        prefixes, runner = engine.memory.prefixes, engine.runner
        prefixes.poll = partial(self._poll, prefixes.poll)
        runner.start = partial(self._start, runner.start)
        for owner, name in ((engine, "step"), (engine.scheduler, "plan"), (prefixes, "open")):
            setattr(owner, name, partial(self._settled, getattr(owner, name)))

    def let_go(self) -> None:
        """From now on nothing is held and nothing fails."""
        self.rate = 0.0
        with self._changed:
            self._plans.clear()
            self._held.clear()
            self._changed.notify_all()

    # ---- on the engine's thread

    def _submit(self, kind: type, submit: Callable[..., Any], *arguments: Any) -> Any:
        with self._changed:  # before its thread asks for the plan
            job = submit(*arguments)
            self._jobs[kind].append(job)
            drawn = self._chance.random()
            if drawn < self.rate:
                segment = self._chance.choice(self.transfers.segments)
                until = self._polls + self._chance.randint(1, MOST_POLLS)
                self._plans[job] = Plan(segment, drawn < self.rate / 5, until)
        return job

    def _poll(self, poll: Callable[[], None]) -> None:
        self._settle()
        self._polls += 1
        self._release(lambda job: self._held[job] <= self._polls)
        self._settled(poll)
        self._settle()

    def _start(self, start: Callable[[Any], None], step: Any) -> None:
        """Layers may be waited for from here on: a restore that has begun to bring them is let go."""
        self._release(lambda job: isinstance(job, Restore) and job.ready(0))
        start(step)

    def _release(self, due: Callable[[Any], bool]) -> None:
        with self._changed:
            self._held = {job: until for job, until in self._held.items() if not due(job)}
            self._changed.notify_all()

    def _settled(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self._settle()
        return call(*arguments)

    def _settle(self) -> None:
        deadline = time.monotonic() + BOUND
        while not self._is_settled():
            assert time.monotonic() < deadline, "the transfers hang"
            time.sleep(5e-5)

    def _is_settled(self) -> bool:
        """Whether all that is not done is held, or waits behind what is."""
        with self._changed:
            for jobs in self._jobs.values():
                while jobs and jobs[0].done:
                    self._count(jobs.popleft())
                if jobs and jobs[0] not in self._held:
                    return False
            left = sum(not job.done for jobs in self._jobs.values() for job in jobs)
            return self.transfers._open == left  # nothing is being saved either

    def _count(self, job: Any) -> None:
        self._plans.pop(job, None)
        if isinstance(job, Restore) and job.error is None:
            for source in job.sources[: job.usable]:
                self.counts["from host" if source.on_host else "from disk"] += 1

    # ---- on the threads of the transfers

    def _before_segment(self, job: Any, segment: Any) -> None:
        with self._changed:
            plan = self._plans.get(job)
            if plan is None or segment is not plan.segment:
                return
            del self._plans[job]
            self.counts["failures" if plan.fails else "delays"] += 1
            if plan.fails:
                raise OSError("injected")
            self._held[job] = plan.until
            if not self._changed.wait_for(lambda: job not in self._held, BOUND):
                raise TimeoutError("nobody polls")

    def _chance_of(self, key: bytes, number: int) -> random.Random:
        """Of the page's read of that number, or its writes (0): the order of pages is the threads' affair."""
        return random.Random(f"{self.seed} {number} {key.hex()}")

    def _read(self, disk: Any, read: Callable[..., Any], key: bytes, tokens: bytes) -> Any:
        self._reads[key] += 1
        chance = self._chance_of(key, self._reads[key])
        if chance.random() < self.rate / 10:
            self.counts["disk reads failed"] += 1
            fault, path = chance.choice(DISK_FAULTS), disk._path(key)
            if fault == "raised":
                raise OSError("injected")
            if path.exists():
                content = path.read_bytes()
                if fault == "removed":
                    path.unlink()
                elif fault == "cut":
                    path.write_bytes(content[:-1])
                else:
                    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return read(key, tokens)

    def _write(self, write: Callable[..., bool], key: bytes, *content: Any) -> bool:
        if self._chance_of(key, 0).random() < self.rate / 10:
            raise OSError("injected")
        return write(key, *content)
