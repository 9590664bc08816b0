"""Traffic of coding agents against an OpenAI-compatible server: many turns over a growing prompt."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megaspan.errors import UserError

if TYPE_CHECKING:
    import httpx

SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "po", "ri", "su", "ta", "ve")
CALIBRATION_WORDS = 512
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Lengths:
    """Token counts between two bounds, as many in each octave: most prompts are short, a few are long."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise UserError(f"lengths {self.low}-{self.high} must be two whole numbers, the smaller first")

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From "2000", always the same, or "500-8000"."""
        low, _, high = text.partition("-")
        try:
            return cls(int(low), int(high or low))
        except ValueError:
            raise UserError(f"{text!r} is not a length in tokens, such as 2000 or 500-8000") from None

    def draw(self, randomness: random.Random) -> int:
        return min(self.high, round(self.low * (self.high / self.low) ** randomness.random()))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the clients do. Checked on construction; UserError names the field.

    sessions: conversations in all; concurrency: how many go on at once. turns: requests of a session.
    first_prompt: tokens of its first request; shared_share: which share of them, at the beginning, all
    sessions have in common. added: tokens that the user, or a tool, adds at each later turn. output: tokens
    of a reply.
    think_seconds: mean pause before a turn. abort_share: how many replies the client leaves half-way.
    exact_output: whether replies go on to their full length whatever the model says (`ignore_eos`).
    """

    sessions: int = 16
    concurrency: int = 4
    turns: int = 4
    first_prompt: Lengths = field(default_factory=lambda: Lengths(500, 4000))
    added: Lengths = field(default_factory=lambda: Lengths(50, 500))
    output: Lengths = field(default_factory=lambda: Lengths(16, 128))
    shared_share: float = 0.5
    think_seconds: float = 0.0
    abort_share: float = 0.0
    exact_output: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "concurrency", "turns"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("shared_share", "abort_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if not 0 <= self.think_seconds < TIMEOUT_SECONDS:
            raise UserError(f"think_seconds is {self.think_seconds}; it must be at least 0 and below an hour")


@dataclass
class Turn:
    """One request as its client saw it. Times are seconds; `token_times` are those of the reply's pieces."""

    session: int
    number: int  # 0 for the session's first
    started: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    outcome: str = "error"  # "finished", "aborted" or "error"
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None where the server does not say
    completion_tokens: int = 0
    error: str = ""

    @property
    def first_token_seconds(self) -> float | None:
        return self.token_times[0] - self.started if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times)]


def words(count: int, randomness: random.Random) -> str:
    """So many made-up words, a line end behind each twelfth. A word's tokens are the tokenizer's choice."""
    made = ["".join(randomness.choices(SYLLABLES, k=2)) for _ in range(max(0, count))]
    return "".join(word + ("\n" if number % 12 == 11 else " ") for number, word in enumerate(made))


class Clients:
    """Plays `traffic` against the server that `client` points to, and keeps what happened in `turns`."""

    def __init__(self, client: "httpx.AsyncClient", model: str, traffic: Traffic) -> None:
        self.client, self.model, self.traffic = client, model, traffic
        self.turns: list[Turn] = []
        self.tokens_per_word = 1.0

    async def run(self, progress: Callable[[int], None] = lambda done: None) -> float:
        """Play all sessions; returns the seconds that they took."""
        self.tokens_per_word = await self._calibrate()
        waiting, done = iter(range(self.traffic.sessions)), itertools.count(1)
        started = time.perf_counter()

        async def play() -> None:
            for session in waiting:
                await self._session(session)
                progress(next(done))

        await asyncio.gather(*(play() for _ in range(self.traffic.concurrency)))
        return time.perf_counter() - started

    async def _calibrate(self) -> float:
        """How many tokens a word costs, from two prompts that differ in words only."""
        counts = []
        for length in (1, CALIBRATION_WORDS):
            text = words(length, random.Random(f"{self.traffic.seed}/calibration"))
            turn = Turn(-1, 0, time.perf_counter())
            await self._request(turn, [{"role": "user", "content": text}], 1, leave_after=None)
            if turn.outcome == "error":
                raise UserError(f"the server did not answer a first request: {turn.error}")
            counts.append(turn.prompt_tokens)
        per_word = (counts[1] - counts[0]) / (CALIBRATION_WORDS - 1)
        return per_word if per_word > 0 else 1.0

    async def _session(self, session: int) -> None:
        traffic, randomness = self.traffic, random.Random(f"{self.traffic.seed}/{session}")
        messages = self._first_messages(randomness)
        for number in range(traffic.turns):
            if traffic.think_seconds:
                await asyncio.sleep(min(randomness.expovariate(1 / traffic.think_seconds), TIMEOUT_SECONDS))
            length = traffic.output.draw(randomness)
            leaves = randomness.random() < traffic.abort_share
            leave_after = randomness.randrange(1, max(2, length)) if leaves else None
            turn = Turn(session, number, time.perf_counter())
            self.turns.append(turn)
            reply = await self._request(turn, messages, length, leave_after)
            if turn.outcome == "error":
                return
            added = self._text(traffic.added.draw(randomness), randomness)
            messages += [reply, {"role": "user", "content": added}]

    def _first_messages(self, randomness: random.Random) -> list[dict[str, Any]]:
        length = self.traffic.first_prompt.draw(randomness)
        shared = round(length * self.traffic.shared_share)
        system = self._text(shared, random.Random(f"{self.traffic.seed}/shared"))
        messages = [{"role": "system", "content": system}] if shared else []
        return [*messages, {"role": "user", "content": self._text(length - shared, randomness) or "go"}]

    def _text(self, tokens: int, randomness: random.Random) -> str:
        return words(round(tokens / self.tokens_per_word), randomness)

    async def _request(
        self, turn: Turn, messages: list[dict[str, Any]], length: int, leave_after: int | None
    ) -> dict[str, Any]:
        """Stream one reply into `turn`; returns it as the assistant's message. Errors go to `turn.error`."""
        import httpx

        reply = {"content": "", "reasoning_content": ""}
        try:
            async with self.client.stream(
                "POST", "chat/completions", json=self._body(messages, length)
            ) as answer:
                if answer.status_code != 200:
                    turn.error = (
                        f"{answer.status_code}: {(await answer.aread())[:200].decode(errors='replace')}"
                    )
                    return {}
                async for chunk in _chunks(answer):
                    _add_chunk(turn, reply, chunk)
                    if leave_after is not None and len(turn.token_times) >= leave_after:
                        turn.outcome = "aborted"
                        turn.completion_tokens = len(turn.token_times)
                        break
                if turn.outcome == "error":
                    turn.error = "the stream ended without a finish reason"
        except (httpx.HTTPError, ValueError) as error:
            turn.outcome, turn.error = "error", str(error) or type(error).__name__
        finally:
            turn.ended = time.perf_counter()
        return {
            "role": "assistant",
            **{name: text for name, text in reply.items() if text or name == "content"},
        }

    def _body(self, messages: list[dict[str, Any]], length: int) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": length,
            "stream": True,
            "stream_options": {"include_usage": True},
            # agents send the reasoning back, so that every turn's prompt begins with the one before
            "chat_template_kwargs": {"clear_thinking": False},
        }
        return {**body, "ignore_eos": True} if self.traffic.exact_output else body


async def _chunks(answer: "httpx.Response") -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]."""
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if line.startswith("data:") and data:
            yield json.loads(data)


def _add_chunk(turn: Turn, reply: dict[str, str], chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        raise ValueError(f"the server broke the stream off: {chunk['error']}")
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        reply["content"] += content
        reply["reasoning_content"] += reasoning
        if content or reasoning or delta.get("tool_calls"):
            turn.token_times.append(time.perf_counter())
        if choice.get("finish_reason"):
            turn.outcome = "finished"
    usage = chunk.get("usage")
    if usage:
        turn.prompt_tokens = usage.get("prompt_tokens") or 0
        turn.completion_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        turn.cached_tokens = details.get("cached_tokens")
