"""A soak of the engine: random requests, aborts and transfer faults in tiny pools; answers equal solo runs.

    python -m tests.engine.soak --requests 2000 --seed 1

The seed decides all that happens, and is printed first: given again, it happens again.
"""

import argparse
import faulthandler
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

import megaspan
from megaspan.engine.engine import Engine
from megaspan.engine.request import Output, State
from megaspan.engine.sampling import SamplingParams
from megaspan.model.transformer import Transformer
from megaspan.ops.threads import give_back_team
from tests.engine.engines import (
    DEBUG,
    PAGE,
    assert_idle,
    debug_model,
    fix_costs,
    logprobs_of,
    make_engine,
    poison_freed_pages,
    tokens_of,
)
from tests.engine.seeded_transfers import SeededTransfers
from tests.engine.solo import solo

SOURCES = Path(__file__).parents[2] / "src"
STEMS = 48
STATES = (State.waiting, State.loading, State.reading, State.decoding)
TOKEN_SECONDS, PAIR_SECONDS, STEP_SECONDS = 1e-3, 1e-7, 1.0  # chunks of 1000 tokens, of 400 after 20,000


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What to run.

    longest: tokens of a request, prompt and completion together. answers: most of a completion. pages,
    host_pages, disk_gib: of the tiers. disk: the folder of the disk's (None: a temporary one). fault_rate:
    of the transfers. crowd: requests that run or wait at once. minutes: after which it counts as hanging.
    """

    requests: int = 2000
    seed: int = 0
    longest: int = 20_000
    answers: int = 600
    pages: int = 5_100
    host_pages: int = 9_000
    disk: str | None = None
    disk_gib: float = 0.25
    write_policy: str = "write_through"
    fault_rate: float = 0.2
    max_running: int = 24
    crowd: int = 64
    minutes: float = 180.0


@dataclass
class Job:
    """One request. abort: the state in which it is to be aborted, after so many steps of being in it."""

    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int  # tokens it may draw
    abort: tuple[State, int] | None
    aborted_in: State | None = None
    outputs: list[Output] = field(default_factory=list)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (*(() if self.params.ignore_eos else DEBUG.eos_token_id), *self.params.stop_token_ids)


def random_job(number: int, soak: Soak, stems: list[list[int]], chance: random.Random) -> Job:
    """A prompt of 1 to `longest` tokens (log-uniform) that often begins like one of the `stems`."""
    length = min(int(soak.longest ** chance.random()), soak.longest - 1)
    stem: list[int] = chance.choice(stems) if stems and chance.random() < 0.8 else []
    kept = stem[: length if chance.random() < 0.7 else chance.randint(0, length)]
    prompt = kept + [chance.randrange(DEBUG.vocab_size) for _ in range(length - len(kept))]
    params = random_params(soak, chance)
    aborted = chance.random() < 0.25
    abort = (chance.choice((*STATES, State.loading)), chance.choice([0, 0, 1, 4])) if aborted else None
    limit = min(params.max_tokens or soak.longest, soak.longest - length)
    return Job(number, prompt, params, limit, abort)


def random_params(soak: Soak, chance: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=int(soak.answers ** chance.random()),
        min_tokens=chance.choice([0, 0, 0, 1]),
        temperature=chance.choice([0.0, 0.0, 0.7, 1.0]),
        top_p=chance.choice([1.0, 0.9]),
        top_k=chance.choice([0, 5]),
        presence_penalty=chance.choice([0.0, 0.0, 1.0]),
        seed=chance.randrange(1 << 40),
        ignore_eos=chance.random() < 0.5,
        stop_token_ids=tuple(chance.choices(range(DEBUG.vocab_size), k=chance.choice([0, 0, 1, 10]))),
    )


class Run:
    """Feeds jobs to an engine, aborts those that are to be, and checks each one when it has ended."""

    def __init__(self, soak: Soak, model: Transformer, engine: Engine):
        self.soak, self.model, self.engine = soak, model, engine
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self._chance = random.Random(soak.seed)
        self._stems: list[list[int]] = []  # prompts and conversations that others go on with
        self._running: dict[str, Job] = {}
        self._due: dict[str, int] = {}  # at which step it is aborted
        self._ended: list[Job] = []

    def finish(self) -> None:
        """AssertionError where a job does not end, ends wrongly, or the steps get too many."""
        left, began, most = self.soak.requests, time.monotonic(), 2000 + 200 * self.soak.requests
        while left or self.engine.has_work:
            assert self.steps < most, f"{len(self._running)} requests are left after {most} steps"
            for _ in range(min(left, self._chance.randint(0, 3), self.soak.crowd - len(self._running))):
                self._submit(random_job(left, self.soak, self._stems, self._chance))
                left -= 1
            self._abort()
            for output in self.engine.step():
                self._take(output)
            self.steps += 1
            if len(self._ended) >= 50 or not self._running:
                self._check_ended()
                seconds = time.monotonic() - began
                print(f"{left + len(self._running):6} left, {self.steps} steps, {seconds:.0f} s", flush=True)
        assert not self._running, "requests got lost"

    def _submit(self, job: Job) -> None:
        self._running[self.engine.submit(job.prompt, job.params, str(job.number))] = job
        self._remember(job.prompt)

    def _remember(self, stem: list[int]) -> None:
        self._stems = [*self._stems[-STEMS:], stem]

    def _abort(self) -> None:
        for request_id, job in self._running.items():
            state = self.engine.requests[request_id].state
            if job.abort is not None and state is job.abort[0] and request_id not in self._due:
                self._due[request_id] = self.steps + job.abort[1]
            if self._due.get(request_id) == self.steps:
                job.aborted_in = state
                assert self.engine.abort(request_id)

    def _take(self, output: Output) -> None:
        job = self._running[output.request_id]
        job.outputs.append(output)
        if output.finish_reason is not None:
            self._ended.append(self._running.pop(output.request_id))
            self._remember([*job.prompt, *tokens_of(job.outputs)])
            self._due.pop(output.request_id, None)

    def _check_ended(self) -> None:
        for job in self._ended:
            check(self.model, job)
            aborted = job.outputs[-1].finish_reason == "abort" and job.aborted_in
            self.counts[f"abort while {aborted.name}" if aborted else str(job.outputs[-1].finish_reason)] += 1
        self._ended.clear()
        give_back_team()


def check(model: Transformer, job: Job) -> None:
    """AssertionError unless the job ended once, where its solo run ends, with the bits of that."""
    name, last = f"request {job.number}", job.outputs[-1]
    assert last.finish_reason in ("stop", "length", "abort"), f"{name}: {last.finish_reason}: {last.error}"
    assert all(output.finish_reason is None for output in job.outputs[:-1]), f"{name} went on after its end"
    drawn, logprobs = tokens_of(job.outputs), logprobs_of(job.outputs)
    stops = [place for place, token in enumerate(drawn) if token in job.stop_ids]
    ending: dict[str, Any] = {"stop_reason": None, "finish_reason": None}
    if stops:
        ending = {"stop_reason": drawn[stops[0]], "finish_reason": "stop"}
    elif len(drawn) >= job.limit:
        ending["finish_reason"] = "length"
    elif job.aborted_in is not None:
        ending["finish_reason"] = "abort"
    given = {key: getattr(last, key) for key in ending}
    assert given == ending, f"{name} ended after {len(drawn)} of {job.limit} tokens by {given}, not {ending}"
    assert stops in ([], [len(drawn) - 1]), f"{name} went on after a stop id"
    assert len(drawn) <= job.limit, f"{name} drew {len(drawn)} tokens, {job.limit} at most were asked for"
    assert (last.prompt_tokens, last.completion_tokens) == (len(job.prompt), len(drawn)), f"{name}: counts"
    if drawn:
        expected = solo(model, job.prompt, job.params, drawn, job.stop_ids)
        assert drawn == expected[0], f"{name}: tokens differ from the solo run's"
        assert logprobs == expected[1], f"{name}: log-probabilities differ from the solo run's"


def run(soak: Soak) -> dict[str, int]:
    """Run and check; returns what happened, so that a caller can see that it was worth running."""
    print(f"soak of {megaspan.__path__[0]}, seed {soak.seed}: {soak}", flush=True)
    faulthandler.dump_traceback_later(60 * soak.minutes, exit=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _run(soak, Path(soak.disk or folder))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(soak: Soak, folder: Path) -> dict[str, int]:
    model = debug_model(config=DEBUG.replace(max_position_embeddings=soak.longest))
    options = {name: getattr(soak, name) for name in ("pages", "host_pages", "write_policy", "max_running")}
    options |= {"disk_folder": folder, "disk_gib": soak.disk_gib, "max_waiting": soak.crowd}
    engine = make_engine(model, step_seconds=STEP_SECONDS, load_timeout=60.0, **options)
    assert soak.pages * PAGE >= soak.longest, "give the longest request as many pages as it needs"
    fix_costs(engine, TOKEN_SECONDS, PAIR_SECONDS)
    poison_freed_pages(engine)
    evictions = count_evictions(engine)
    transfers = SeededTransfers(engine, soak.seed, soak.fault_rate)
    try:
        jobs = Run(soak, model, engine)
        jobs.finish()
        transfers.let_go()
        assert_idle(engine)
        stats = engine.stats()
    finally:
        engine.close()
    totals = {
        "preemptions": stats.preempted_total,
        "failed restores": stats.failed_restores_total,
        "prefix hits": stats.prefix_hits_total,
        "steps": jobs.steps,
    }
    return {**jobs.counts, **evictions, **transfers.counts, **totals}


def count_evictions(engine: Engine) -> Counter[str]:
    """Counts from now on, by tier, how many pages of the prefix tree were given up."""
    counts: Counter[str] = Counter()
    tree: Any = engine.memory.prefixes.tree

    def count(tier: str, drop: Any, node: Any) -> int:
        counts[f"evicted from {tier}"] += 1
        return drop(node)

    for tier in ("device", "host"):
        name = f"drop_{tier}"
        setattr(tree, name, partial(count, tier, getattr(tree, name)))
    return counts


WORTH_RUNNING = (
    *(f"abort while {state.name}" for state in STATES),
    *("stop", "length", "preemptions", "prefix hits", "delays", "failures", "failed restores"),
    *("evicted from device", "evicted from host", "from host", "from disk", "disk reads failed"),
)


def missing(happened: dict[str, int]) -> list[str]:
    """What a soak has to go through, and this one did not."""
    return [name for name in WORTH_RUNNING if not happened.get(name)]


def main() -> None:
    if not Path(megaspan.__path__[0]).is_relative_to(SOURCES):  # installed from another working tree
        os.environ["PYTHONPATH"] = str(SOURCES)
        os.execv(sys.executable, sys.orig_argv)
    parser = argparse.ArgumentParser(description=__doc__)
    for option in fields(Soak):
        kind = str if option.default is None else type(option.default)
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=kind, default=option.default)
    parser.set_defaults(seed=random.randrange(1 << 30))
    soak, began = Soak(**vars(parser.parse_args())), time.monotonic()
    torch.set_num_threads(2)
    happened = run(soak)
    print(f"{happened}\n{soak.requests} answers are their solo runs': {time.monotonic() - began:.0f} s")
    if lacking := missing(happened):
        raise SystemExit(f"it was not worth running: {', '.join(lacking)} never happened")


if __name__ == "__main__":
    main()
