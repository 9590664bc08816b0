"""The white space at the end of a prompt is spelled by the model, in its own tokens."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megaspan.complete.healing import Healing, split_blank_end

TOKENS = [b"a", b"\n", b"\n    ", b"\n    b", b" ", b"    ", b"<|file|>", b"", b"\n\n"]


@pytest.mark.parametrize(
    ("text", "kept", "taken"),
    [
        ("def f():\n", "def f():", b"\n"),
        ("x = 1\n\n    ", "x = 1", b"\n\n    "),
        ("x", "x", b""),
        (" \n", " \n", b""),
        ("", "", b""),
    ],
)
def test_only_the_white_space_after_text_is_taken_off(text, kept, taken):
    assert split_blank_end(text) == (kept, taken)


def test_first_token_may_spell_the_line_end_together_with_the_indentation():
    healing = Healing(b"\n", TOKENS)
    allowed = healing.restrict(torch.zeros(len(TOKENS))).isfinite().tolist()
    assert [token for token, fits in zip(TOKENS, allowed, strict=True) if fits] == [
        b"\n", b"\n    ", b"\n    b", b"\n\n",
    ]  # fmt: skip
    assert healing.accept(2) == 1  # the line end was shown already, the indentation was not
    assert healing.restrict(torch.zeros(len(TOKENS))).isfinite().all()


@given(st.lists(st.sampled_from([b"\n", b" ", b"    "]), min_size=1, max_size=6), st.randoms())
def test_sampled_tokens_spell_what_was_taken_off_whatever_the_model_likes(parts, random):
    taken = b"".join(parts)
    healing, spelled, shown = Healing(taken, TOKENS), b"", 0
    while healing.missing:
        scores = torch.tensor([random.random() for _ in TOKENS])
        token_id = int(healing.restrict(scores).argmax())
        spelled += TOKENS[token_id]
        shown += healing.accept(token_id)
    assert spelled.startswith(taken)
    assert shown == len(taken)
