"""A request on its way through the engine, and what a step adds to it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

import numpy as np

from megaspan.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from megaspan.cache.prefix import Node
    from megaspan.cache.prefix_cache import Lease
    from megaspan.engine.grammar import GrammarState
    from megaspan.engine.stops import StopStrings

ErrorKind = Literal["internal", "grammar", "memory"]


@dataclass(slots=True)
class Output:
    """What one step adds to one request; the counts are filled in with the finish.

    logprobs: natural logarithms under the model's own distribution, of each token. top_logprobs: for
    each token the likeliest ids with theirs, where asked for. finish_reason: "stop", "length", "abort" or
    "error"; stop_reason: the token id or string that stopped it. withheld: how many of the last characters
    of the text so far no reader may see, see `StopStrings`. error, error_kind: what went wrong, and
    whether in the request's own grammar, for want of memory, or in the engine. weights_version: of the
    weights when it last began to be read. Made at every step of every request, so it is not frozen: that
    would cost three times as much to construct.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    withheld: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    weights_version: str = ""


@dataclass(frozen=True)
class Ending:
    """Why a request is over; see `Output`."""

    reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None


def failure(error: str, kind: ErrorKind = "internal") -> Ending:
    return Ending("error", error=error, error_kind=kind)


class State(Enum):
    """waiting: for room. loading: its prefix is on the way from a lower tier. reading: its prompt is being
    read in chunks. decoding: one token a step."""

    waiting, loading, reading, decoding, finished = range(5)


class Request:
    """One prompt and what is drawn after it.

    tokens: ids of prompt and completion so far. computed: how many of them have rows in the cache.
    slot: its row of the page table while it runs, else -1. stop_ids: token ids that end it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        seed: int,
        order: int,
        stop_ids: tuple[int, ...] = (),
    ):
        self.id = request_id
        self.params = params
        self.tokens = array("i", prompt)
        self.prompt_tokens = len(self.tokens)
        self.max_tokens = max_tokens
        self.seed = seed
        self.order = order  # of arrival
        self.stop_ids = stop_ids
        self.state = State.waiting
        self.slot = -1
        self.computed = 0
        self.cached_tokens = -1  # at its first admission; a later one after a preemption does not count
        self.lease: Lease | None = None
        self.grammar: GrammarState | None = None
        self.stops: StopStrings | None = None
        # While it waits: who is computing its prefix, and how much of it; tree nodes that are being brought
        # up for others; how many pages it lacked when it was last tried, and how many had been published
        # then: since, others can have computed no more of its prefix than what was published after that.
        self.behind: tuple[Request, int] | None = None
        self.awaited: list[Node] = []
        self.missing = self.tried_at = 0
        self.weights_version = ""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that must be read before the next one can be drawn."""
        return len(self.tokens) - self.computed

    def ending(self, token_id: int) -> Ending | None:
        """Whether `token_id`, just drawn and the last of `tokens`, ends the request. Asked once a token."""
        if token_id in self.stop_ids:
            return Ending("stop", token_id)
        if self.grammar is not None and not self.grammar.accept(token_id):
            return failure(self.grammar.error, "grammar")
        matched = self.stops.push(token_id) if self.stops is not None else None
        if matched is not None:
            return Ending("stop", matched)
        if self.grammar is not None and self.grammar.finished:
            return Ending("stop")
        return Ending("length") if self.generated >= self.max_tokens else None

    def ids(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int32, a copy."""
        return np.frombuffer(self.tokens, dtype=np.int32, count=stop - start, offset=4 * start).copy()
