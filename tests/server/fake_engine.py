"""An engine without a model: it plays scripted tokens, and shows what was asked and what was aborted."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megaspan.engine.request import ErrorKind, Output
from megaspan.engine.sampling import SamplingParams
from megaspan.engine.stats import EngineStats
from megaspan.engine.stops import StopStrings
from megaspan.errors import BadPrompt, ContextTooLong, Overloaded
from megaspan.tokenizer import Tokenizer

MODEL_FOLDER = Path(__file__).parents[2] / "models" / "span-code"
LOGPROB = -0.5
PAGES = 128
PAGE_SIZE = 64


@cache
def shipped_tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_FOLDER)


def encode_reply(text: str) -> list[int]:
    """Ids of a reply in which the spelled special tokens are meant as such."""
    tokenizer = shipped_tokenizer()
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, tokenizer.special_tokens)) + ")", text):
        special = tokenizer.special_tokens.get(piece)
        ids += tokenizer.encode(piece) if special is None else [special]
    return ids


@dataclass
class Submitted:
    request_id: str
    prompt: list[int]
    params: SamplingParams

    @property
    def prompt_text(self) -> str:
        return shipped_tokenizer().decode(self.prompt)


def thoughtful(request: Submitted) -> str:
    """What the fake says unless told otherwise: it thinks if the prompt lets it, then greets."""
    thinking = request.prompt_text.rstrip().endswith("<think>")
    return ("A thought.</think>\n" if thinking else "") + "Hello there, wörld! 🙂"


class FakeEngine:
    """Plays `script(request)`, a text with special tokens spelled out, then an end-of-text token.

    delay: seconds before each output. burst: tokens of an output. failing: every request ends in such
    an error after its first output. Stop strings, max_tokens and aborts work as in a true engine.
    """

    def __init__(
        self,
        script: str | Callable[[Submitted], str] = thoughtful,
        *,
        delay: float = 0.0,
        burst: int = 1,
        max_context: int = 2048,
        failing: ErrorKind | None = None,
        max_waiting: int = 1000,
    ) -> None:
        self.tokenizer = shipped_tokenizer()
        self.script = script
        self.delay = delay
        self.burst = burst
        self.max_context = max_context
        self.failing: ErrorKind | None = failing
        self.max_waiting = max_waiting
        self.is_alive = True
        self.waiting = 0
        self.submitted: list[Submitted] = []
        self.aborted: list[str] = []
        self.running: dict[str, FakeStream] = {}
        self.ended: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated = 0
        self.started = self.stopped = False

    async def start(self) -> None:
        self.started = True

    async def stop(self, drain_seconds: float = 0) -> None:
        self.stopped = True

    def prepare(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> Submitted:
        if not prompt:
            raise BadPrompt("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_context:
            raise ContextTooLong(f"{len(prompt)} tokens", self.max_context)
        if min(prompt) < 0 or max(prompt) >= self.tokenizer.vocab_size:
            raise BadPrompt("a token id is outside the vocabulary")
        room = self.max_context - len(prompt)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        params = replace(params, max_tokens=most)
        return Submitted(request_id or f"fake-{len(self.submitted)}", list(prompt), params)

    def enqueue(self, request: Submitted) -> "FakeStream":
        assert request.request_id not in self.running
        if len(self.running) >= self.max_waiting:
            raise Overloaded("too many requests are waiting: try again later")
        self.submitted.append(request)
        self.prompt_tokens += len(request.prompt)
        text = self.script if isinstance(self.script, str) else self.script(request)
        stream = self.running[request.request_id] = FakeStream(self, request, encode_reply(text))
        return stream

    def abort(self, request_id: str) -> bool:
        stream = self.running.get(request_id)
        if stream is None:
            return False
        self.aborted.append(request_id)
        stream.abort()
        return True

    def stats(self) -> EngineStats:
        locked = sum(-(-len(stream.request.prompt) // PAGE_SIZE) for stream in self.running.values())
        cached = min(len(self.ended), PAGES - locked)
        return EngineStats(
            running=len(self.running),
            waiting=self.waiting,
            loading=0,
            preempted_total=0,
            pages_total=PAGES,
            pages_free=PAGES - locked - cached,
            pages_cached=cached,
            pages_locked=locked,
            host_pages_total=256,
            host_pages_used=16,
            disk_pages_used=0,
            prefix_queries_total=self.prompt_tokens,
            prefix_hits_total=self.prompt_tokens // 2,
            host_hits_total=0,
            failed_restores_total=0,
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.generated,
            requests_total=dict(self.ended),
            steps_total=self.generated,
            tokens_per_second=1 / self.delay if self.running and self.delay else 0.0,
            weights_version="7",
        )

    async def flush_cache(self) -> int:
        return 5


class FakeStream:
    """One request's outputs. Leaving the iteration early counts as an abort."""

    def __init__(self, engine: FakeEngine, request: Submitted, script: list[int]) -> None:
        self.engine = engine
        self.request = request
        self.request_id = request.request_id
        self.script = script
        self.drawn: list[int] = []
        self.stops = StopStrings(engine.tokenizer, request.params.stop)
        self.stopped = asyncio.Event()

    def abort(self) -> None:
        self.stopped.set()
        self._end("abort")

    def _end(self, reason: str) -> None:
        if self.engine.running.pop(self.request_id, None) is not None:
            self.engine.ended[reason] += 1

    async def __aiter__(self) -> AsyncIterator[Output]:
        try:
            while True:
                await self._pause()
                output = self._next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self.request_id in self.engine.running:
                self.engine.abort(self.request_id)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self.engine.delay):
                await self.stopped.wait()
        except TimeoutError:
            pass

    def _next(self) -> Output:
        if self.stopped.is_set():
            return self._finished((), "abort")
        if self.engine.failing and self.drawn:
            return self._finished((), "error")
        params = self.request.params
        tokens: list[int] = []
        while len(tokens) < self.engine.burst:
            if not self.script:
                eos = self.engine.tokenizer.special("<|endoftext|>")
                return self._finished((*tokens, eos), "stop", eos)
            tokens.append(self.script.pop(0))
            self.drawn.append(tokens[-1])
            stop = self.stops.push(tokens[-1])
            if stop is not None:
                return self._finished(tuple(tokens), "stop", stop)
            if params.max_tokens is not None and len(self.drawn) >= params.max_tokens:
                return self._finished(tuple(tokens), "length")
        return self._output(tuple(tokens))

    def _output(self, tokens: tuple[int, ...]) -> Output:
        self.engine.generated += len(tokens)
        alternatives = self.request.params.logprobs
        top = None
        if alternatives is not None:
            top = tuple(tuple((token + k, LOGPROB - k) for k in range(alternatives)) for token in tokens)
        return Output(self.request_id, tokens, (LOGPROB,) * len(tokens), top, self.stops.withheld)

    def _finished(self, tokens: tuple[int, ...], reason: str, stop: int | str | None = None) -> Output:
        self._end(reason)
        output = self._output(tokens)
        output.finish_reason, output.stop_reason = reason, stop
        if reason == "error":
            output.error, output.error_kind = "a row of logits holds no numbers", self.engine.failing
        output.prompt_tokens = len(self.request.prompt)
        output.cached_tokens = len(self.request.prompt) // PAGE_SIZE * PAGE_SIZE
        output.completion_tokens = len(self.drawn) + (isinstance(stop, int))
        output.weights_version = "7"
        return output
