"""Structured output: which tokens a grammar allows next (llguidance walks the grammar)."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper  # what LLTokenizer takes for a tokenizer of one's own
from torch import Tensor

from megaspan.engine.sampling import Grammar
from megaspan.errors import UserError
from megaspan.tokenizer import Tokenizer

CACHED_GRAMMARS = 64
COMPILER_STACK = 256 << 20  # bytes, of which as many are used as the grammar is deep
LIMITS = LLParserLimits(max_grammar_size=50_000, step_max_items=20_000, verbose_errors=False)
# A reply is not to be filled with blanks; `not`, and other keywords that cannot be enforced, are refused.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,32}", "coerce_one_of": True, "lenient": False}
NAMED_TOKEN = re.compile(r"<\[(\d{1,9})\]>")
# Stands for the end in llguidance's vocabulary, which must have at least one special token.
END_NAME = b"<|end|>"

STARTING = threading.Lock()  # a stack size is set for all threads of the process that start meanwhile


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones by their text. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        if not eos_token_ids:
            raise ValueError("a grammar's text can only end with an end-of-sequence token: name one")
        self.vocabulary = _Vocabulary(tokenizer, sorted(set(eos_token_ids)))
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> "GrammarState":
        """A fresh state of the grammar.

        Raises UserError, one line, for a schema, expression or grammar that is not valid, that cannot be
        enforced, that nothing matches, or that takes too much work to compile.
        """
        if grammar.begins_after is not None and grammar.begins_after >= self.vocabulary.size:
            raise UserError(
                f"the grammar begins after {grammar.begins_after}, which is no token id: change it"
            )
        key = grammar.kind, grammar.text
        with self._lock:
            matcher = self._compiled.get(key)
        matcher = matcher or self._matcher(grammar)
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        named = self.vocabulary.named_in(grammar)
        return GrammarState(matcher.deep_copy(), self.vocabulary, named, grammar.begins_after)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """Compile on a stack that no allowed text can overflow: llguidance recurses, unguarded."""
        outcome: list[LLMatcher | str] = []
        with STARTING:
            usual = threading.stack_size(COMPILER_STACK)
            thread = threading.Thread(target=lambda: outcome.append(self._attempt(grammar)), daemon=True)
            thread.start()
            threading.stack_size(usual)
        thread.join()
        result = outcome[0] if outcome else "the compiler failed"
        if isinstance(result, LLMatcher):
            return result
        line = " ".join(result.replace("<non-verbose/>", "").split())[:300]
        raise UserError(f"the {grammar.kind} cannot be used: {line}")

    def _attempt(self, grammar: Grammar) -> LLMatcher | str:
        """The compiled grammar, or what is wrong with it."""
        try:
            matcher = LLMatcher(self.vocabulary.tokenizer, _source(grammar), log_level=0, limits=LIMITS)
        except (ValueError, RecursionError) as error:
            return str(error) or type(error).__name__
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first step is the hardest: it is not to hold up other requests
        if matcher.is_error():
            return matcher.get_error()
        return "nothing matches it, or only the empty text" if matcher.is_stopped() else matcher


class _Vocabulary:
    """The tokens as llguidance sees them: text only, so that no text can spell a special token."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: list[int]) -> None:
        special = set(tokenizer.special_tokens.values()) | set(eos_token_ids)
        self.size = tokenizer.vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokens = [
            b"" if number in special else piece for number, piece in enumerate(tokenizer.token_bytes)
        ]
        self._special = special
        self.text_words = self.words(number for number, piece in enumerate(self.tokens) if piece)
        self.eos_words = self.words(self.eos_token_ids)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Source(tokenizer, self.tokens, eos_token_ids[0])), eos_token=eos_token_ids
        )

    def is_text(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and len(self.tokens[token_id]) > 0

    def words(self, token_ids: Iterable[int]) -> Tensor:
        """int32 [ceil(V / 32)]: a bit for each id, set for those given."""
        bits = np.zeros(-(-self.size // 32) * 32, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))

    def named_in(self, grammar: Grammar) -> frozenset[int]:
        """The special tokens that the grammar names, but for those that end a sequence."""
        if grammar.kind != "lark":
            return frozenset()
        named = {int(number) for number in NAMED_TOKEN.findall(grammar.text)}
        return frozenset(named & self._special) - self.eos_token_ids


class _Source:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], end: int) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = end
        self.special_token_ids = [end]
        self.tokens = [END_NAME if number == end else piece for number, piece in enumerate(tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


class GrammarState:
    """Where one request stands in its grammar.

    A special token is allowed only where a grammar in Lark's notation names it, as `<[7]>`; text cannot
    spell it. With `begins_after`, every token is allowed until that one has come, and the grammar holds from
    the next one on. The end of the sequence is allowed where the text is complete; nothing is after it.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: _Vocabulary, named: frozenset[int], begins_after: int | None
    ) -> None:
        self._matcher, self._vocabulary, self._named = matcher, vocabulary, named
        self._inner_words = (
            vocabulary.text_words | vocabulary.words(named) if named else vocabulary.text_words
        )
        self._begins_after = begins_after
        self._length = 0  # tokens accepted
        self._begins_at: int | None = 0 if begins_after is None else None  # tokens before the grammar's first
        self._ended = False  # the last accepted token ended the sequence

    @property
    def finished(self) -> bool:
        """Whether the text is complete and only the end can follow, or has followed."""
        if self._ended:
            return True
        return self._begins_at is not None and self._matcher.is_stopped() and self._matcher.is_accepting()

    def mask(self, into: Tensor) -> None:
        """Write which ids may come next: int32 [ceil(V / 32)] in main memory, a bit for each id.

        No bit is set after the end, or where the grammar takes too much work.
        """
        if self._begins_at is None:
            into.fill_(-1)
        elif self._ended or self._matcher.is_error():
            into.zero_()
        else:
            self._matcher.unsafe_compute_mask_ptr(into.data_ptr(), into.numel() * into.element_size())
            into &= self._inner_words
            if self._matcher.is_accepting():
                into |= self._vocabulary.eos_words

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and no change, if the grammar does not allow it."""
        if self._ended:
            return False
        if self._begins_at is None:
            if token_id == self._begins_after:
                self._begins_at = self._length + 1
        elif token_id in self._vocabulary.eos_token_ids:
            if not self._matcher.is_accepting():
                return False
            self._ended = True
        elif not self._is_known(token_id) or self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._length += 1
        return True

    def _is_known(self, token_id: int) -> bool:
        return token_id in self._named or self._vocabulary.is_text(token_id)

    def accept_many(self, token_ids: Sequence[int]) -> int:
        """Take tokens up to the first that is not allowed; how many were taken."""
        for count, token_id in enumerate(token_ids):
            if not self.accept(token_id):
                return count
        return len(token_ids)

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens, such as drafts that were rejected."""
        if not 0 <= count <= self._length:
            raise ValueError(f"cannot undo {count} of {self._length} tokens")
        before = self._consumed()
        self._length -= count
        self._ended = self._ended and count == 0
        undone = before - self._consumed()
        if undone:
            self._matcher.rollback(undone)
        if self._begins_after is not None and self._begins_at is not None and self._length < self._begins_at:
            self._begins_at = None

    def _consumed(self) -> int:
        """How many of the accepted tokens llguidance has seen."""
        return 0 if self._begins_at is None else max(0, self._length - self._ended - self._begins_at)


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
