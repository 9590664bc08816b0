"""What users of a busy engine feel: gaps, first tokens and second turns, on a real model."""

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megaspan.engine.config import EngineConfig
from megaspan.engine.engine import Engine
from megaspan.engine.sampling import SamplingParams
from megaspan.model.folder import LanguageModel

Say = Callable[[str], None]
ANSWER = 64  # tokens of a turn's answer
ADDED = 200  # tokens of the second question


@dataclass
class Watched:
    """A request and when its tokens came, in seconds since it was submitted."""

    submitted: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finished: bool = False

    @property
    def first(self) -> float:
        return self.times[0]

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between tokens that came between two moments (of the clock)."""
        moments = [self.submitted + moment for moment in self.times]
        return [
            later - earlier
            for earlier, later in itertools.pairwise(moments)
            if earlier >= start and later <= end
        ]


class Watch:
    """Steps an engine and notes when each request's tokens come."""

    def __init__(self, engine: Engine, seed: int = 0):
        self.engine = engine
        self.random = np.random.default_rng(seed)
        self.requests: dict[str, Watched] = {}

    def prompt(self, length: int) -> list[int]:
        return self.random.integers(0, self.engine.sampler.vocab_size, length).tolist()

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Watched:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        watched = Watched(time.perf_counter())
        self.requests[self.engine.submit(prompt, params)] = watched
        return watched

    def step(self) -> None:
        outputs, now = self.engine.step(), time.perf_counter()
        for output in outputs:
            watched = self.requests[output.request_id]
            if output.error is not None:
                raise RuntimeError(output.error)
            watched.times += [now - watched.submitted] * len(output.token_ids)
            watched.token_ids += output.token_ids
            if output.finish_reason is not None:
                watched.finished, watched.cached_tokens = True, output.cached_tokens

    def finish(self, *requests: Watched) -> None:
        while not all(request.finished for request in requests):
            self.step()


@dataclass(frozen=True)
class Interference:
    """While a long prompt is read, in seconds.

    The largest and the median gap of a decoding request; the worst time to first token of short prompts that
    arrive meanwhile; how long the reading took.
    """

    budget: float
    largest_gap: float
    median_gap: float
    short_first_token: float
    reading: float


def interference(
    model: LanguageModel, context: int, short: int = 100, arrivals: int = 8, say: Say = lambda said: None
) -> Interference:
    """One request decodes, another reads `context` tokens, and short ones arrive in between."""
    config = EngineConfig(pages=-(-(context + 16384) // 64))
    engine = _engine(model, config)
    try:
        watch = Watch(engine)
        decoding = watch.submit(watch.prompt(1000), 1 << 20)
        long_warm_up = watch.submit(watch.prompt(4000), 1)  # the engine learns what a step costs
        watch.finish(long_warm_up)
        reader = watch.submit(watch.prompt(context), 1)
        began = time.perf_counter()
        short_ones: list[Watched] = []
        request = next(iter(reversed(engine.requests.values())))
        while not reader.finished:
            if len(short_ones) < arrivals and request.computed > context * (len(short_ones) + 0.5) / arrivals:
                short_ones.append(watch.submit(watch.prompt(short), 1))
                say(f"{request.computed:,} of {context:,} tokens read in {time.perf_counter() - began:.0f} s")
            watch.step()
        ended = time.perf_counter()
        gaps = decoding.gaps(began, ended)
        watch.finish(*short_ones)  # the slowest may well be one that the long prompt's end overtook
        firsts = [one.first for one in short_ones]
        return Interference(
            config.step_seconds, max(gaps), float(np.median(gaps)), max(firsts), ended - began
        )
    finally:
        engine.close()


@dataclass(frozen=True)
class SecondTurn:
    """Times to first token in seconds: of a first turn, and of the second from device, host and disk.

    cached: tokens of the second turns that were not computed.
    """

    context: int
    first: float
    device: float
    host: float
    disk: float
    cached: tuple[int, int, int]


def second_turn(model: LanguageModel, context: int, say: Say = lambda said: None) -> SecondTurn:
    """Ask, then go on with the answer and a new question: at once, after eviction, after a restart."""
    pages = -(-(context + 4096) // 64)
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(pages=pages, host_pages=2 * pages, disk_folder=Path(folder))
        engine = _engine(model, config)
        try:
            watch = Watch(engine)
            prompt = watch.prompt(context)
            first = watch.submit(prompt, ANSWER)
            watch.finish(first)
            say(f"first turn: {first.first:.1f} s to the first token")
            turns = [prompt + first.token_ids + watch.prompt(ADDED) for _ in range(3)]
            on_device = watch.submit(turns[0], 1)
            watch.finish(on_device)
            say(f"from the device: {on_device.first:.2f} s")
            _evict(engine)
            on_host = watch.submit(turns[1], 1)
            watch.finish(on_host)
            say(f"from the host: {on_host.first:.2f} s")
            assert engine.memory.tiers is not None
            engine.memory.tiers.transfers.flush(60)
        finally:
            engine.close()
        engine = _engine(model, config)
        try:
            # What a running engine has learned of its speed decides whether the disk is worth it.
            watch = Watch(engine, seed=1)
            watch.finish(watch.submit(watch.prompt(2000), 1))
            on_disk = watch.submit(turns[2], 1)
            watch.finish(on_disk)
            say(f"from the disk: {on_disk.first:.2f} s")
        finally:
            engine.close()
    cached = (on_device.cached_tokens, on_host.cached_tokens, on_disk.cached_tokens)
    return SecondTurn(context, first.first, on_device.first, on_host.first, on_disk.first, cached)


@dataclass(frozen=True)
class Streams:
    """Tokens per second over all of some concurrent requests, prompts included in the time."""

    count: int
    tokens_per_second: float


def streams(model: LanguageModel, count: int, prompt: int = 64, answer: int = 256) -> Streams:
    engine = _engine(model, EngineConfig(pages=-(-count * (prompt + answer + 64) // 64)))
    try:
        watch = Watch(engine)
        watch.finish(watch.submit(watch.prompt(prompt), 8))
        began = time.perf_counter()
        watch.finish(*[watch.submit(watch.prompt(prompt), answer) for _ in range(count)])
        return Streams(count, count * answer / (time.perf_counter() - began))
    finally:
        engine.close()


def reading(model: LanguageModel, context: int) -> Streams:
    """Tokens per second of reading one prompt."""
    engine = _engine(model, EngineConfig(pages=-(-(context + 4096) // 64)))
    try:
        watch = Watch(engine)
        watch.finish(watch.submit(watch.prompt(2000), 1))
        request = watch.submit(watch.prompt(context), 1)
        watch.finish(request)
        return Streams(1, context / request.first)
    finally:
        engine.close()


def _engine(model: LanguageModel, config: EngineConfig) -> Engine:
    engine = Engine(model, config)
    engine.warm_up()
    return engine


def _evict(engine: Engine) -> None:
    """Take every device page, so that all that is cached must move to the host, and give them back."""
    prefixes = engine.memory.prefixes
    assert engine.memory.tiers is not None
    while True:
        engine.memory.tiers.transfers.flush(60)
        prefixes.poll()
        pages = prefixes.take(prefixes.available())
        if pages is not None:
            for rows in (rows for tensors in engine.memory.pools.storage.values() for rows in tensors):
                rows.view(torch.uint8).fill_(255)  # nobody may still read them
            prefixes.pools.give(pages)
            return
