import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.engine.stops import HeldText, StopStrings
from tests.test_tokenizer import TOKENIZER

letters = st.text(alphabet="ab<é", max_size=24)
stops = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=5), max_size=4).map(tuple)


def expected(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """What is shown and what matched, by looking at every prefix of the text."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@given(letters, stops, st.lists(st.integers(0, 24), max_size=8))
def test_any_split_shows_the_same_text(text, stop, cuts):
    """P68: what a stream shows does not depend on where it is cut."""
    held = HeldText(stop)
    shown = "".join(held.push(piece) for piece in pieces(text, cuts)) + held.finish()
    assert (shown, held.matched) == expected(text, stop)


@given(letters, stops)
def test_what_is_shown_is_never_part_of_a_stop_string_and_all_else_is(text, stop):
    held, shown = HeldText(stop), ""
    for place, character in enumerate(text):
        shown += held.push(character)
        if held.matched is not None:
            return
        so_far = text[: place + 1]
        beginnings = [
            size for string in stop for size in range(1, len(string)) if so_far.endswith(string[:size])
        ]
        assert shown == so_far[: len(so_far) - max(beginnings, default=0)]


def test_nothing_comes_after_a_match():
    held = HeldText(("stop",))
    assert held.push("a st") == "a "
    assert held.push("op and more") == ""
    assert (held.matched, held.push("x"), held.finish()) == ("stop", "", "")


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (("ab", "abc"), "xabc", "ab"),  # complete first
        (("bc", "abc"), "xabc", "abc"),  # both at once: the longest
        (("abcd", "bc"), "abce", "bc"),
        (("aab",), "aaab", "aab"),  # begins inside a failed attempt
    ],
)
def test_the_first_to_be_complete_wins_then_the_longest(stop, text, matched):
    for held in (HeldText(stop), HeldText(stop[::-1])):
        held.push(text)
        assert held.matched == matched


@given(letters, stops, st.lists(st.integers(0, 24), max_size=8))
def test_tokens_stop_where_their_text_does(text, stop, cuts):
    """P68, for token ids: the cuts give tokenizations other than the canonical one."""
    watch = StopStrings(TOKENIZER, stop)
    token_ids = [token for piece in pieces(text, cuts) for token in TOKENIZER.encode(piece)]
    matched = next((found for token in token_ids if (found := watch.push(token))), None)
    assert matched == expected(text, stop)[1]


def test_a_stop_string_inside_a_token_and_a_character_over_several_are_found():
    inside = next(piece for piece in TOKENIZER.token_bytes if piece.isalpha() and len(piece) >= 6).decode()
    assert StopStrings(TOKENIZER, (inside[2:4],)).push(TOKENIZER.encode(inside)[0]) == inside[2:4]
    token_ids = [TOKENIZER.token_bytes.index(bytes([byte])) for byte in "日".encode()]
    watch = StopStrings(TOKENIZER, ("日",))
    assert [watch.push(token) for token in token_ids] == [None, None, "日"]


def test_little_is_held_of_much_text():
    held = HeldText(("a" * 1000 + "b",))
    shown = sum(len(held.push("a" * 100)) for _ in range(100))
    assert shown == 10_000 - 1000
    assert len(held.finish()) == 1000
