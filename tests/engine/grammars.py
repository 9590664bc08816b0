"""What the tests of structured output share: one compiler, and ways to walk a grammar."""

import numpy as np
import torch

from megaspan.engine.grammar import GrammarState
from megaspan.engine.grammar_compiler import GrammarCompiler
from megaspan.engine.sampler import Sampler
from megaspan.engine.sampling import Grammar, SamplingParams
from tests.test_tokenizer import TOKENIZER

END, USER, THINK_END = (TOKENIZER.special(name) for name in ("<|endoftext|>", "<|user|>", "</think>"))
EOS = (END, USER)
SPECIALS = set(TOKENIZER.special_tokens.values())
COMPILER = GrammarCompiler(TOKENIZER, EOS)
WORDS = -(-TOKENIZER.vocab_size // 32)

# Of few letters, and for each further one as much work as for all before it, many times over.
AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b" |'


def allowed(state: GrammarState) -> set[int]:
    words = torch.full((WORDS,), 12345, dtype=torch.int32)
    state.mask(words)
    return set(np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little")).tolist())


def take(state: GrammarState, token_ids: list[int]) -> int:
    """How many of the tokens are accepted, up to the first that is not."""
    for count, token_id in enumerate(token_ids):
        if not state.accept(token_id):
            return count
    return len(token_ids)


def follow(state: GrammarState, text: str) -> bool:
    token_ids = TOKENIZER.encode(text)
    return take(state, token_ids) == len(token_ids)


def sampled_text(grammar: Grammar, seed: int, most: int = 400) -> str | None:
    """What comes of random logits, drawn as the engine does; None where it does not end within `most`."""
    state, sampler = COMPILER.compile(grammar), Sampler(TOKENIZER.vocab_size, 1)
    sampler.admit(0, SamplingParams(grammar=grammar, temperature=2.0), [], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask, drawn = torch.empty(1, WORDS, dtype=torch.int32), []
    for step in range(most):
        state.mask(mask[0])
        logits = torch.randn(1, TOKENIZER.vocab_size, generator=generator)
        sampled = sampler.sample(logits, [0], [step], mask)
        assert not sampled.failed, state.error
        token = int(sampled.token_ids[0])
        assert state.accept(token)
        if token in EOS:
            assert state.finished
            assert SPECIALS.isdisjoint(drawn)
            return TOKENIZER.decode(drawn)
        drawn.append(token)
    return None
