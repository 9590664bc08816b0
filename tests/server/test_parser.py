"""Replies are the same message however their tokens are cut, and text stays what it was."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.engine.request import Output
from megaspan.server.parser import (
    Message,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    complete_message,
)
from tests.server.replies import (
    END,
    MEANT,
    PLAIN,
    REPLY,
    SPECIALS,
    TOKENIZER,
    bursts,
    call,
    ids,
    meaning,
    merged,
    parse,
    read,
    reply_of,
    spelled,
    without_markers,
)


def test_a_reply_is_split_into_its_parts() -> None:
    reply = reply_of(thinking=True)
    events = reply.push(Output("", tuple(ids(REPLY)))) + reply.push(END)
    message = complete_message(events)
    assert meaning(message) == MEANT
    assert reply.ended_in_calls
    assert reply.parser.reasoning_tokens == len(ids(REPLY.partition("</think>")[0]))
    assert len({call.id for call in message.tool_calls}) == 2
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [(start.index, start.name) for start in starts] == [(0, "edit"), (1, "get_time")]
    assert [event.index for event in events if isinstance(event, ToolCallEnd)] == [0, 1]


def byte_by_byte(token_ids: list[int]) -> list[int]:
    """The same text in tokens of a byte each."""
    byte_ids = {piece: number for number, piece in enumerate(TOKENIZER.token_bytes) if len(piece) == 1}
    specials = set(TOKENIZER.special_tokens.values())
    split = []
    for number in token_ids:
        text = TOKENIZER.token_bytes[number]
        split += [number] if number in specials else [byte_ids[bytes([byte])] for byte in text]
    return split


ODD_REPLIES = {
    "whole": REPLY,
    "call in the reasoning": "I look.\n" + call("edit", ("path", "p"), line="") + "</think>done",
    "no arguments": "</think>" + call("get_time") + call("get_time", line="") + "\nand on ",
    "an unclosed call before another": "</think><tool_call>edit<arg_key>path</arg_key>" + call("get_time"),
    "cut off in a value": "</think>"
    + call("get_time")
    + "<tool_call>edit<arg_key>text</arg_key><arg_value>é🙂",
    "cut off in a name": "x\n</think>\n y \n<tool_call>get_time",
    "markers in odd places": "a</tool_call><arg_key>b</think> c</think>\n\n<arg_value>d<|user|>e</arg_value>",
}


@pytest.mark.parametrize("text", ODD_REPLIES.values(), ids=ODD_REPLIES)
@pytest.mark.parametrize("split", [list, byte_by_byte], ids=["tokens", "bytes"])
def test_the_events_do_not_depend_on_where_a_reply_is_cut(text: str, split: Callable) -> None:
    """P68: at every token, at every character and inside of characters, and in groups of any size."""
    whole = split(ids(text))
    expected = merged(parse(ids(text), 1000, thinking=True))
    for size in range(1, 7):
        assert merged(parse(whole, size, thinking=True)) == expected
    for cut in range(1, len(whole)):
        assert merged(parse(whole, [cut, len(whole)], thinking=True)) == expected


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


PIECES = st.sampled_from(
    [
        *SPECIALS,
        "\n",
        " ",
        "a",
        "edit",
        "text",
        "count",
        "12",
        '"',
        "{",
        "\\",
        "é",
        "🙂",
        "<",
        "</arg",
        "null",
    ]
)
replies = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=25).map("".join)


@given(replies, bursts, st.booleans(), st.booleans())
@settings(max_examples=300)
def test_any_reply_parses_alike_however_split(text: str, sizes: list[int], thinking: bool, sep: bool) -> None:
    """P68, for replies that no model should write: no error, and JSON exactly where a call is complete."""
    token_ids = ids(text)
    whole = parse(token_ids, max(1, len(token_ids)), thinking=thinking, separate_reasoning=sep)
    assert merged(parse(token_ids, sizes, thinking=thinking, separate_reasoning=sep)) == merged(whole)
    complete = {event.index for event in whole if isinstance(event, ToolCallEnd)}
    for index, made in enumerate(complete_message(whole).tool_calls):
        assert made.name
        assert is_object(made.arguments) == (index in complete)


@given(replies, bursts)
@settings(max_examples=100)
def test_events_come_in_a_client_s_order(text: str, sizes: list[int]) -> None:
    open_call, begun = None, 0
    for event in parse(ids(text), sizes, thinking=True):
        match event:
            case ToolCallStart(index):
                assert index == begun
                open_call, begun = index, begun + 1
            case ToolArgumentsDelta(index):
                assert index == open_call
            case ToolCallEnd(index):
                assert index == open_call
                open_call = None
            case TextDelta(shown) | ReasoningDelta(shown):
                assert open_call is None
                assert shown


@given(st.text(max_size=60), bursts)
@settings(max_examples=100)
def test_text_round_trips_without_tools(text: str, sizes: list[int]) -> None:
    """P69: a parser of calls must not touch the text of a reply that can hold none."""
    text = "if a < b:" + text + "\n"
    assert read(spelled(text), sizes, tools=()) == Message(content=text)


def test_tool_markers_mean_nothing_without_tools() -> None:
    """P69: no call, no doubled text, and no special token in the text."""
    assert read(ids("x" + call("edit", ("path", "p"), line="") + "y"), tools=()) == Message(
        content="xeditpathpy"
    )


@given(st.lists(st.sampled_from(SPECIALS), max_size=3), st.text(max_size=20))
@settings(max_examples=100)
def test_spelled_markers_are_text(markers: list[str], text: str) -> None:
    """A reply about the markers spells them in characters; only the special token counts."""
    text = "-" + "-".join([*markers, text]) + "-"
    assert read(spelled(text)) == Message(content=text)
    begun, ended = ids("<tool_call>edit<arg_key>text</arg_key><arg_value>"), ids("</arg_value></tool_call>")
    value = read([*begun, *spelled(text), *ended])
    assert json.loads(value.tool_calls[0].arguments) == {"text": text}


def test_special_tokens_never_leak() -> None:
    for special in SPECIALS:
        message = read(ids(f"a{special}b"))
        shown = message.reasoning + message.content + "".join(c.arguments for c in message.tool_calls)
        assert special not in shown


def test_text_around_calls_keeps_its_own_blanks() -> None:
    message = read(ids(f"\n\n  first\n{call('get_time')}\nsecond\n{call('get_time')}\n"))
    assert message.content == "  first\n\nsecond"


def test_a_continued_text_keeps_its_first_line_end() -> None:
    assert read(spelled("\nmore"), continued=True).content == "\nmore"
    assert read(spelled("\nmore")).content == "more"


def test_reasoning_in_the_text_when_it_is_not_separated() -> None:
    message = read(ids("why\n</think>\nbecause"), thinking=True, separate_reasoning=False)
    assert message == Message(content="<think>why</think>\nbecause")
    cut_off = read(ids("why"), thinking=True, separate_reasoning=False)
    assert cut_off == Message(content="<think>why")


def test_a_second_thought_is_reasoning_too() -> None:
    message = read(ids("a</think>\nb<think>c</think>d"), thinking=True)
    assert message == Message(reasoning="ac", content="bd")


def test_a_burst_makes_few_events() -> None:
    events = parse(ids("one two three four</think>five six seven"), 1000, thinking=True)
    assert events == [ReasoningDelta("one two three four"), TextDelta("five six seven")]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=40)
def test_a_vocabulary_without_markers_has_them_in_text(sizes: list[int]) -> None:
    token_ids = PLAIN.encode(REPLY.removesuffix("<|observation|>"))
    assert meaning(read(token_ids, sizes, tokenizer=PLAIN, thinking=True)) == MEANT


@given(st.text(alphabet="<>/think toolcarg_key", max_size=40), bursts)
@settings(max_examples=100)
def test_without_markers_in_the_vocabulary_other_text_round_trips(text: str, sizes: list[int]) -> None:
    text = f"-{text}-".replace("think>", "think")
    assert read(PLAIN.encode(text), sizes, tokenizer=PLAIN, tools=()) == Message(content=text)


def test_the_beginning_of_a_spelled_marker_is_text_where_a_special_token_follows() -> None:
    tokenizer = without_markers("<|user|>")
    token_ids = [*tokenizer.encode("a <tool"), tokenizer.special("<|user|>"), *tokenizer.encode("_call>b")]
    assert read(token_ids, tokenizer=tokenizer) == Message(content="a <tool_call>b")
