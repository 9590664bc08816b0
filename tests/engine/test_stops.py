import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.engine.sampling import SamplingParams
from megaspan.engine.stops import StopStrings
from tests.engine.engines import DEBUG, make_engine
from tests.model.models import random_model
from tests.test_tokenizer import TOKENIZER

letters = st.text(alphabet="ab<é", max_size=24)
stops = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=5), max_size=4).map(tuple)


def expected(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """What comes before the first match and what matched, by looking at every prefix of the text."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def token_ids_of(text: str, cuts: Sequence[int] = ()) -> list[int]:
    """Tokens of the text; the cuts give other tokenizations than the canonical one."""
    return [token for piece in pieces(text, cuts) for token in TOKENIZER.encode(piece)]


@given(letters, stops, st.lists(st.integers(0, 24), max_size=8))
def test_tokens_stop_where_their_text_does(text, stop, cuts):
    """P68: at the first match, however the text is split, and nothing of the match or behind it is shown."""
    watch, stream, seen = StopStrings(TOKENIZER, stop), TOKENIZER.stream(), ""
    before, matched = expected(text, stop)
    for token in token_ids_of(text, cuts):
        seen += stream.push(token)
        found = watch.push(token)
        if found is not None:
            assert (seen[: len(seen) - watch.withheld], found) == (before, matched)
            return
    assert matched is None


@given(letters, stops)
def test_what_may_become_a_stop_string_is_withheld_and_nothing_else(text, stop):
    watch, stream, seen = StopStrings(TOKENIZER, stop), TOKENIZER.stream(), ""
    for token in token_ids_of(text):
        seen += stream.push(token)
        if watch.push(token) is not None:
            return
        beginnings = [
            size for string in stop for size in range(1, len(string)) if seen.endswith(string[:size])
        ]
        assert watch.withheld == max(beginnings, default=0)


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
    for strings in (stop, stop[::-1]):
        watch = StopStrings(TOKENIZER, strings)
        assert next(filter(None, map(watch.push, token_ids_of(text, [1, 2, 3])))) == matched


def test_a_stop_string_inside_a_token_and_a_character_over_several_are_found():
    inside = next(piece for piece in TOKENIZER.token_bytes if piece.isalpha() and len(piece) >= 6).decode()
    watch = StopStrings(TOKENIZER, (inside[2:4],))
    assert watch.push(TOKENIZER.encode(inside)[0]) == inside[2:4]
    assert watch.withheld == len(inside) - 2
    token_ids = [TOKENIZER.token_bytes.index(bytes([byte])) for byte in "日".encode()]
    watch = StopStrings(TOKENIZER, ("日",))
    assert [watch.push(token) for token in token_ids] == [None, None, "日"]


def test_special_tokens_count_as_they_are_spelled():
    """A stop string may be a marker, or reach over one."""
    watch = StopStrings(TOKENIZER, ("so.</think>\n", "<|user|>"))
    ids = [*TOKENIZER.encode("And so."), TOKENIZER.special("</think>"), *TOKENIZER.encode("\n")]
    assert [watch.push(token) for token in ids][-1] == "so.</think>\n"
    assert StopStrings(TOKENIZER, ("<|user|>",)).push(TOKENIZER.special("<|user|>")) == "<|user|>"


def test_little_is_withheld_of_much_text():
    watch = StopStrings(TOKENIZER, ("a" * 1000 + "b",))
    for token in token_ids_of("a" * 10_000):
        watch.push(token)
    assert watch.withheld == 1000


def test_the_engine_says_with_each_output_what_is_withheld():
    """One authority: what readers are shown follows from the engine's own search alone."""
    model: Any = random_model(DEBUG.replace(vocab_size=TOKENIZER.vocab_size))
    model.tokenizer = TOKENIZER
    engine = make_engine(model)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    free = engine.generate([[5, 6, 7]], params)[0]
    assert {output.withheld for output in free} == {0}
    text = TOKENIZER.decode([token for output in free for token in output.token_ids])
    stop = (text[4:8], "never to be found")
    watch = StopStrings(TOKENIZER, stop)
    for output in engine.generate([[5, 6, 7]], replace(params, stop=stop))[0]:
        watch.push(output.token_ids[0])
        assert output.withheld == watch.withheld
    assert (output.finish_reason, output.withheld > 0) == ("stop", True)
    engine.close()
