"""A tokenizer's tokens as a grammar sees them."""

import re
from collections.abc import Iterable

import numpy as np
import torch
from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper  # what LLTokenizer takes for a tokenizer of one's own
from torch import Tensor

from megaspan.engine.sampling import Grammar
from megaspan.tokenizer import Tokenizer

NAMED_TOKEN = re.compile(r"<\[(\d{1,9})\]>")
# Stands for the end in llguidance's vocabulary, which must have at least one special token.
END_NAME = b"<|end|>"


class GrammarVocabulary:
    """Text only, so that no text can spell a special token; sets of ids are int32 [ceil(V / 32)] of bits."""

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
        """A bit for each id, set for those given."""
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
