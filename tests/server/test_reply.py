"""What a reader sees of a reply with stop strings: all that comes before the first, and nothing of it."""

from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaspan.engine.request import Output
from megaspan.engine.stops import StopStrings
from megaspan.server.parser import Message, complete_message
from megaspan.server.reply import PlainReply
from tests.server.replies import END, TOKENIZER, bursts, ids, merged, reply_of, spelled

BYTES = {piece: number for number, piece in enumerate(TOKENIZER.token_bytes) if len(piece) == 1}
NAMES = {number: name for name, number in TOKENIZER.special_tokens.items()}

parts = st.one_of(
    st.sampled_from(list(NAMES)).map(lambda number: [number]),
    st.sampled_from("\n ab.<|é🙂").map(spelled),
    st.sampled_from(["think>", "</think>", "ab", "\n\n"]).map(spelled),
    st.sampled_from([*"é🙂".encode(), 0xFF]).map(lambda byte: [BYTES[bytes([byte])]]),
)
replies = st.lists(parts, max_size=24).map(lambda lists: [number for each in lists for number in each])
stops = st.lists(
    st.one_of(
        st.text(alphabet="ab.\n<é🙂", min_size=1, max_size=4),
        st.sampled_from(
            ["</think>", ".</think>\n", "think>", "b<tool_call>a", "</arg_value>", "<|", "\ufffd"]
        ),
    ),
    max_size=4,
).map(tuple)


class Character(NamedTuple):
    text: str
    special: str = ""  # name of the special token of which it is a part


def characters(token_ids: list[int]) -> list[Character]:
    """The text in which the engine looks for stop strings, one character at a time."""
    stream, found = TOKENIZER.stream(), []
    for number in token_ids:
        name = NAMES.get(number, "")
        if name:
            found += map(Character, stream.finish())
        found += [Character(each, name) for each in (name or stream.push(number))]
    return found


def first_match(text: str, stop: tuple[str, ...]) -> tuple[int, int] | None:
    """Where the stop string that is complete first begins and ends; the longest of several."""
    for end in range(1, len(text) + 1):
        begins = [end - len(string) for string in stop if text[:end].endswith(string)]
        if begins:
            return min(begins), end
    return None


def outputs(token_ids: list[int], stop: tuple[str, ...], sizes: list[int]) -> list[Output]:
    """What an engine says of a reply that it ends at a stop string, or at its last token."""
    watch, made, left, turn = StopStrings(TOKENIZER, stop), [], list(token_ids), 0
    while left:
        output, matched = Output(""), None
        for _ in range(sizes[turn % len(sizes)]):
            if left and matched is None:
                output.token_ids += (left.pop(0),)
                matched = watch.push(output.token_ids[-1])
        output.withheld, turn = watch.withheld, turn + 1
        made.append(output)
        if matched is not None:
            output.finish_reason, output.stop_reason = "stop", matched
            return made
    return [*made, Output("", finish_reason="length", withheld=watch.withheld)]


@given(replies, stops, bursts)
@example(spelled("a.b"), ("b", "a.b", ".b"), [1])
@example([BYTES[bytes([byte])] for byte in "é".encode()[:1]], ("\ufffd",), [1])
@settings(max_examples=300)
def test_text_is_what_comes_before_the_first_stop_string(token_ids, stop, sizes):
    """P68: whatever the tokens, with characters split over them and special tokens between them."""
    seen = characters(token_ids)
    text = "".join(each.text for each in seen)
    match = first_match(text, stop)
    shown = [each.text for each in seen[: match[0] if match else None] if not each.special]
    if match is None:
        cut_character = TOKENIZER.decode(token_ids)[len(text) :]
        shown.append(cut_character)
    reply = PlainReply(TOKENIZER)
    assert "".join(map(reply.push, outputs(token_ids, stop, sizes))) == "".join(shown)


@given(replies, stops, bursts)
@settings(max_examples=200)
def test_no_beginning_of_a_stop_string_is_ever_sent(token_ids, stop, sizes):
    """What was sent cannot be taken back. No more is held than one token beyond what must be."""
    reply, told, sent = PlainReply(TOKENIZER), [], ""
    for output in outputs(token_ids, stop, sizes):
        if output.finish_reason is not None:
            return
        told += output.token_ids
        sent += reply.push(output)
        seen = characters(told)
        text = "".join(each.text for each in seen)
        begun = [size for string in stop for size in range(1, len(string)) if text.endswith(string[:size])]
        allowed = "".join(each.text for each in seen[: len(text) - max(begun, default=0)] if not each.special)
        assert allowed.startswith(sent)
        assert len(allowed) - len(sent) <= max(len(TOKENIZER.token_bytes[number]) for number in token_ids)


@given(replies, stops, bursts, st.booleans())
@settings(max_examples=200)
def test_a_chat_reply_is_that_of_the_tokens_before_the_stop_string(token_ids, stop, sizes, thinking):
    """The parser sees nothing of a stop string: not in text, in reasoning or in a call's arguments."""
    seen = characters(token_ids)
    match = first_match("".join(each.text for each in seen), stop)
    before = token_ids if match is None else tokens_of(seen[: match[0]])
    expected, cut = reply_of(thinking=thinking), reply_of(thinking=thinking)
    events = [event for output in outputs(token_ids, stop, sizes) for event in cut.push(output)]
    assert merged(events) == merged(expected.push(Output("", tuple(before))) + expected.push(END))
    if match is not None:
        assert not cut.ended_in_calls


def tokens_of(seen: list[Character]) -> list[int]:
    """Tokens of the same text; a special token that is not whole is none."""
    token_ids, place = [], 0
    while place < len(seen):
        name = seen[place].special
        if not name:
            token_ids += spelled(seen[place].text)
        elif len(seen) - place >= len(name):
            token_ids.append(TOKENIZER.special(name))
        place += len(name) or 1
    return token_ids


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("</think>", Message(reasoning="I think.")),
        ("think.\n</think>\nIt", Message(reasoning="I")),
        ("think.\n", Message(reasoning="I")),
        ("\nIt is <", Message(reasoning="I think.")),
        ("is", Message(reasoning="I think.", content="It ")),
        ("is <nothing", Message(reasoning="I think.", content="It is <b>.")),
    ],
)
def test_stop_strings_reach_over_what_the_layout_trims(stop, message):
    """The engine's text has the blanks and markers that a reader never sees."""
    reply = reply_of(thinking=True)
    made = outputs(ids("\nI think.\n</think>\nIt is <b>."), (stop,), [1])
    assert complete_message([event for output in made for event in reply.push(output)]) == message


def test_tokens_of_reasoning_are_counted_without_what_is_cut():
    """Held tokens count when they are shown; a character that was never completed is no token."""
    reply = reply_of(thinking=True)
    whole = [*ids("I think so"), BYTES["é".encode()[:1]]]
    for output in outputs(whole, ("so far",), [1]):
        reply.push(output)
    assert reply.parser.reasoning_tokens == len(whole)
    stopped = reply_of(thinking=True)
    for output in outputs(ids("I think.</think>x"), ("</think>x",), [1]):
        stopped.push(output)
    assert stopped.parser.reasoning_tokens == len(spelled("I think."))
