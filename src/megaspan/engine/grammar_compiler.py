"""From a grammar's text to a state that a request can start from."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher

from megaspan.engine.grammar import GrammarState, one_line
from megaspan.engine.grammar_trial import LIMITS, GrammarTrial
from megaspan.engine.grammar_vocabulary import GrammarVocabulary
from megaspan.engine.sampling import Grammar
from megaspan.errors import Overloaded, UserError
from megaspan.tokenizer import Tokenizer

CACHED_GRAMMARS = 64
CACHED_SECONDS = 5.0  # that the kept ones took to compile: what takes long takes memory, up to 15 MB a second
LONGEST_WAIT = 30.0  # seconds, for the grammars that others sent before
# A reply is not to be filled with blanks; `not`, and other keywords that cannot be enforced, are refused.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,32}", "coerce_one_of": True, "lenient": False}


class GrammarCompiler:
    """Compiles grammars for one tokenizer, one at a time, and keeps the last ones by their text: agents send
    the same tools at every turn. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        if not eos_token_ids:
            raise ValueError("a grammar's text can only end with an end-of-sequence token: name one")
        self.vocabulary = GrammarVocabulary(tokenizer, sorted(set(eos_token_ids)))
        # By kind and text: what came of it, an error too, and the seconds that it took.
        self._compiled: OrderedDict[tuple[str, str], tuple[LLMatcher | str, float]] = OrderedDict()
        self._keeping, self._compiling = threading.Lock(), threading.Lock()
        self._trial = GrammarTrial(self.vocabulary.size)

    def compile(self, grammar: Grammar) -> GrammarState:
        """A fresh state of the grammar.

        Raises UserError, one line, for a schema, expression or grammar that is not valid, that cannot be
        enforced, that nothing matches, or that takes too much work to compile; Overloaded where others'
        take too long.
        """
        if grammar.begins_after is not None and grammar.begins_after >= self.vocabulary.size:
            raise UserError(
                f"the grammar begins after {grammar.begins_after}, which is no token id: change it"
            )
        matcher = self._kept(grammar) or self._compile(grammar)
        if isinstance(matcher, str):
            raise UserError(f"the {grammar.kind} cannot be used: {one_line(matcher)}")
        named = self.vocabulary.named_in(grammar)
        return GrammarState(matcher.deep_copy(), self.vocabulary, named, grammar.begins_after)

    def close(self) -> None:
        """End the process that tries grammars, when it has done with those on their way."""
        with self._compiling:
            self._trial.close()

    def _kept(self, grammar: Grammar) -> LLMatcher | str | None:
        key = grammar.kind, grammar.text
        with self._keeping:
            if key not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            return self._compiled[key][0]

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        if not self._compiling.acquire(timeout=LONGEST_WAIT):
            raise Overloaded("other requests' grammars are being compiled: try again later")
        try:
            if kept := self._kept(grammar):
                return kept
            began = time.monotonic()
            matcher = self._attempt(grammar)
            self._keep(grammar, matcher, time.monotonic() - began)
            return matcher
        finally:
            self._compiling.release()

    def _keep(self, grammar: Grammar, matcher: LLMatcher | str, seconds: float) -> None:
        taken = 0.0 if isinstance(matcher, str) else seconds  # an error takes no memory
        with self._keeping:
            self._compiled[grammar.kind, grammar.text] = matcher, taken
            while len(self._compiled) > CACHED_GRAMMARS or (
                len(self._compiled) > 1 and sum(each for _, each in self._compiled.values()) > CACHED_SECONDS
            ):
                self._compiled.popitem(last=False)

    def _attempt(self, grammar: Grammar) -> LLMatcher | str:
        """The compiled grammar, or what is wrong with it."""
        try:
            source = _source(grammar)
            if problem := self._trial(source):
                return problem
            matcher = LLMatcher(self.vocabulary.tokenizer, source, log_level=0, limits=LIMITS)
        except (ValueError, RecursionError) as error:
            return str(error) or type(error).__name__
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first step is the hardest: it is not to hold up other requests
        if matcher.is_error():
            return matcher.get_error()
        return "nothing matches it, or only the empty text" if matcher.is_stopped() else matcher


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it; ValueError or RecursionError if it is no JSON where it must be."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "choice":
        options = json.loads(grammar.text)
        if not isinstance(options, list) or not options:
            raise ValueError("give a list of strings")
        if not all(isinstance(option, str) and option for option in options):
            raise ValueError("give strings, none of them empty")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in options))
    schema = {"type": "object"} if grammar.kind == "json" else json.loads(grammar.text)
    if not isinstance(schema, dict):
        raise ValueError("give a JSON object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, allow_nan=False), overrides=JSON_OPTIONS)
