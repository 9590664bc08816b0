"""One reply's outputs as text or events that a client may see, and what it is told of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from megaspan.engine.request import Output
from megaspan.engine.stops import HeldText
from megaspan.server.parser import Event, ReasoningDelta, ReplyParser, TextDelta
from megaspan.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def visible_ids(output: Output) -> tuple[int, ...]:
    """The output's token ids without the one that ended the reply."""
    ids = output.token_ids
    return ids[:-1] if ids and output.finish_reason == "stop" and output.stop_reason == ids[-1] else ids


class PlainReply:
    """Token ids to text: no special tokens, no half characters, no stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._special_ids = frozenset(tokenizer.special_tokens.values())
        self._stream = tokenizer.stream()
        self._held = HeldText(tuple(stop))

    def push(self, output: Output) -> str:
        """The text that an output completes; with the finish, all that is left."""
        ids = (token_id for token_id in visible_ids(output) if token_id not in self._special_ids)
        shown = "".join([self._held.push(self._stream.push(token_id)) for token_id in ids])
        if output.finish_reason is None:
            return shown
        return shown + self._held.push(self._stream.finish()) + self._held.finish()


class ChatReply:
    """Outputs to the parser's events, with stop strings cut out of text and reasoning."""

    def __init__(self, parser: ReplyParser, stop: Sequence[str] = ()) -> None:
        self.parser = parser
        self._stop = tuple(stop)
        self._kind: type[ReasoningDelta] | type[TextDelta] | None = None
        self._held = HeldText(self._stop)

    def push(self, output: Output) -> list[Event]:
        events = self.parser.push(visible_ids(output))
        if output.finish_reason is not None:
            events += self.parser.finish()
        if not self._stop:
            return events
        shown = [part for event in events for part in self._cut(event)]
        return shown + self._release() if output.finish_reason is not None else shown

    def _cut(self, event: Event) -> list[Event]:
        if self._held.matched is not None:
            return []
        if not isinstance(event, ReasoningDelta | TextDelta):
            return [*self._release(), event]
        released = self._release() if type(event) is not self._kind else []
        self._kind = type(event)
        text = self._held.push(event.text)
        return [*released, self._kind(text)] if text else released

    def _release(self) -> list[Event]:
        """What was held back as a stop string's possible beginning, once no more of its kind can follow."""
        if self._held.matched is not None or self._kind is None:
            return []
        text = self._held.finish()
        kind, self._kind, self._held = self._kind, None, HeldText(self._stop)
        return [kind(text)] if text else []


@dataclass
class TokenRecord:
    """Ids and log-probabilities of a reply's tokens, gathered until they are taken."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def add(self, output: Output) -> None:
        count = len(output.token_ids)
        self.token_ids += output.token_ids
        self.logprobs += [max(value, LEAST_LOGPROB) for value in output.logprobs]
        self.top += output.top_logprobs or [()] * count

    def take(self) -> "TokenRecord":
        """What has been gathered since the last time."""
        taken = TokenRecord(self.token_ids, self.logprobs, self.top)
        self.token_ids, self.logprobs, self.top = [], [], []
        return taken

    def chat_logprobs(self, tokenizer: Tokenizer, alternatives: int) -> dict[str, Any]:
        """In the shape of chat completions."""
        content = [
            {
                **token_logprob(tokenizer, token_id, logprob),
                "top_logprobs": [token_logprob(tokenizer, *pair) for pair in top[:alternatives]],
            }
            for token_id, logprob, top in zip(self.token_ids, self.logprobs, self.top, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion_logprobs(self, tokenizer: Tokenizer, alternatives: int, offset: int) -> dict[str, Any]:
        """In the shape of completions. offset: characters of text before these tokens."""
        tokens = [tokenizer.decode([token_id]) for token_id in self.token_ids]
        offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
        top = [
            {
                tokenizer.decode([token_id]): max(value, LEAST_LOGPROB)
                for token_id, value in pairs[:alternatives]
            }
            for pairs in self.top
        ]
        return {
            "tokens": tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": top if alternatives else None,
            "text_offset": offsets,
        }


def token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode([token_id])
    return {
        "token": text,
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(tokenizer.token_bytes[token_id]),
    }


def openai_usage(prompt_tokens: int, completion_tokens: int, cached: int, reasoning: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
