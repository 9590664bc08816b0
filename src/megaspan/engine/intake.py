"""From a prompt and parameters to a request that can be queued."""

import itertools
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaspan.config import ModelConfig
from megaspan.engine.generation import check_prompt
from megaspan.engine.request import Request
from megaspan.engine.sampling import SamplingParams
from megaspan.engine.stops import StopStrings
from megaspan.errors import ContextTooLong, UserError
from megaspan.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megaspan.engine.grammar_compiler import GrammarCompiler


class Intake:
    """Checks what is asked for and compiles what must be. May be used from any thread.

    max_context: most tokens of a request, prompt and completion together.
    """

    def __init__(self, config: ModelConfig, max_context: int, tokenizer: Tokenizer | None):
        self.config, self.max_context, self.tokenizer = config, max_context, tokenizer
        self._order = itertools.count()
        self._grammars: GrammarCompiler | None = None
        self._building = threading.Lock()

    def prepare(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None) -> Request:
        """Takes a while for a long prompt or a large grammar. UserError for what cannot be served."""
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextTooLong(f"{len(prompt)} tokens", self.max_context)
        ids = check_prompt(self.config, prompt)
        request = Request(
            request_id or secrets.token_hex(8),
            ids.tolist(),
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            order=next(self._order),
            stop_ids=(*(() if params.ignore_eos else self.config.eos_token_id), *params.stop_token_ids),
        )
        if params.grammar is not None:
            request.grammar = self._compiler().compile(params.grammar)
        if params.stop:
            request.stops = StopStrings(self._required_tokenizer("stop strings"), params.stop)
        return request

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _compiler(self) -> "GrammarCompiler":
        from megaspan.engine.grammar_compiler import GrammarCompiler  # its library is needed for nothing else

        tokenizer = self._required_tokenizer("a grammar")
        with self._building:
            if self._grammars is None:
                self._grammars = GrammarCompiler(tokenizer, self.config.eos_token_id)
            return self._grammars

    def _required_tokenizer(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{purpose} needs a tokenizer, and this model's folder has none: leave it out")
        return self.tokenizer
