"""Texts within a budget: the same ids in pieces, and no more work than the budget allows."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from megaspan import token_budget
from megaspan.errors import ContextTooLong, UserError
from megaspan.token_budget import GivenUp, TokenBudget
from megaspan.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "models" / "span-code"
TOKENIZER = Tokenizer.load(FOLDER)
PLENTY = 1 << 30
CODE = "def add(a, b):\n    return [a, b]  # the sum\n"

words = st.sampled_from(
    ["x", "don't", "ab", "12345", "_", "字", "é", "e\u0301", "}", "+", "。", '"', "'", "🙂"]
)
blanks = st.sampled_from([" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028", "\x1c", "", ""])
texts = st.lists(st.one_of(words, blanks), max_size=60).map("".join)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(token_budget, "PIECE", 3)


def with_words(pre_tokenizer: Any) -> Tokenizer:
    """The shipped vocabulary under another family member's rule of what a word is."""
    backend = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizer
    return Tokenizer(backend)


def split_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


FAMILY = {
    "ours": TOKENIZER,
    "contractions and end of text": with_words(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "marks and line ends after signs": with_words(
        split_by(
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    ),
}


@pytest.mark.parametrize("member", FAMILY)
@given(text=texts)
def test_pieces_have_the_ids_of_the_whole(member, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_budget, "PIECE", 3)
        assert "".join(token_budget.pieces(text)) == text
        assert FAMILY[member].encode(text, TokenBudget(PLENTY)) == FAMILY[member].encode(text)


def test_code_is_cut_often(small_pieces):
    assert max(map(len, token_budget.pieces(CODE * 100))) < 30


def test_a_tokenizer_whose_words_depend_on_where_a_text_begins_gets_it_whole(small_pieces):
    tokenizer = with_words(pre_tokenizers.ByteLevel(add_prefix_space=True))
    assert tokenizer.encode(CODE, TokenBudget(PLENTY)) == tokenizer.encode(CODE)


def calls_of(monkeypatch, tokenizer: Tokenizer) -> list[int]:
    """Lengths of the texts that it is really given."""
    usual, lengths = tokenizer.encode_batch, []

    def counted(texts: list[str]) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return usual(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    return lengths


def test_a_text_that_cannot_fit_is_not_encoded_at_all(monkeypatch):
    """P27: whatever its tokens, they would be too many."""
    lengths = calls_of(monkeypatch, TOKENIZER)
    fits = TOKENIZER.longest_token_bytes * 100
    with pytest.raises(ContextTooLong, match=f"{fits + 1} bytes.*maximum context length is 100 tokens"):
        TOKENIZER.encode("é" * (fits // 2) + "x" * (fits % 2 + 1), TokenBudget(100))
    message = [{"role": "user", "content": "x" * fits}]
    with pytest.raises(ContextTooLong, match="bytes"):
        TOKENIZER.apply_chat_template(message, budget=TokenBudget(100))
    assert not lengths


def test_the_longest_tokens_fit_exactly():
    longest = max(TOKENIZER.token_bytes, key=len).decode()
    assert len(longest) == TOKENIZER.longest_token_bytes
    assert TOKENIZER.encode(longest, TokenBudget(1)) == [TOKENIZER.token_bytes.index(longest.encode())]


def test_special_tokens_of_a_template_count_as_one_each():
    ids = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])
    assert (
        TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}], budget=TokenBudget(len(ids)))
        == ids
    )
    with pytest.raises(ContextTooLong, match="more than"):
        TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}], budget=TokenBudget(len(ids) - 1))


def test_a_normaliser_can_make_a_long_text_fit(tmp_path):
    content = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("~" * 10_000 + "x", TokenBudget(1))) == 1


def test_encoding_ends_soon_after_the_budget(monkeypatch, small_pieces):
    lengths = calls_of(monkeypatch, TOKENIZER)
    with pytest.raises(ContextTooLong, match="more than 50 tokens"):
        TOKENIZER.encode(CODE * 30, TokenBudget(50))
    assert sum(lengths) < 500


def test_one_budget_is_for_all_texts_of_a_request():
    budget = TokenBudget(5)
    assert len(TOKENIZER.encode("x y z", budget)) == 3
    with pytest.raises(ContextTooLong):
        TOKENIZER.encode("x y z", budget)


def test_a_stopped_budget_ends_the_encoding(monkeypatch, small_pieces):
    lengths = calls_of(monkeypatch, TOKENIZER)
    budget = TokenBudget(PLENTY)
    budget.stop()
    with pytest.raises(GivenUp):
        TOKENIZER.encode(CODE * 30, budget)
    assert len(lengths) == 1


@pytest.mark.parametrize("character", [" ", "\t", "🙂", "a"])
def test_a_stretch_without_a_break_is_refused(monkeypatch, character):
    lengths = calls_of(monkeypatch, TOKENIZER)
    with pytest.raises(UserError, match="without a break"):
        TOKENIZER.encode("x" + character * (token_budget.LONGEST_PIECE + 1), TokenBudget(PLENTY))
    assert not lengths


def test_the_librarys_panic_is_one_clear_line():
    """Its regular expressions give up after ten million steps, with what is no Exception."""
    with pytest.raises(UserError, match="gave up") as caught:
        TOKENIZER.encode("\t" * 10_100_000)
    assert "\n" not in str(caught.value)
    assert TOKENIZER.encode("x")
