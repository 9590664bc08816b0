"""One reply's outputs as text or events that a client may see, and what it is told of their tokens."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from megaspan.engine.request import Output
from megaspan.server.parser import Event, ReplyParser
from megaspan.server.reply_pieces import PieceStream
from megaspan.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class PlainReply:
    """Outputs to text: no special tokens, no half characters, no stop strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = PieceStream(tokenizer)

    def push(self, output: Output) -> str:
        """The text that an output completes; with the finish, all that is left."""
        return "".join(piece.text for piece in self._pieces.push(output))


class ChatReply:
    """Outputs to the parser's events. last: the last output so far."""

    def __init__(self, tokenizer: Tokenizer, parser: ReplyParser) -> None:
        self.parser = parser
        self.last: Output | None = None
        self._pieces = PieceStream(tokenizer)

    def push(self, output: Output) -> list[Event]:
        self.last = output
        events = self.parser.push(self._pieces.push(output))
        return events if output.finish_reason is None else events + self.parser.finish()

    @property
    def ended_in_calls(self) -> bool:
        """Whether the reply ended by itself and made calls, all complete: they wait for their results."""
        last = self.last
        by_itself = (
            last is not None and last.finish_reason == "stop" and not isinstance(last.stop_reason, str)
        )
        return by_itself and self.parser.called


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
