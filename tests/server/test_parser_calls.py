"""Tool calls that are odd, cut off or in odd places."""

import json

import pytest

from megaspan.engine.request import Output
from megaspan.server.parser import Message, TextDelta, ToolArgumentsDelta, ToolCallEnd, complete_message
from tests.server.replies import END, call, ids, meaning, read, reply_of, spelled


def test_a_call_inside_the_reasoning_ends_it() -> None:
    """P68: a call that stayed a thought would leave an agent without an answer."""
    text = "I look.\n" + call("edit", ("path", "p"), line="") + "</think>done"
    for size in range(1, 7):
        message = read(ids(text), size, thinking=True)
        assert meaning(message) == ("I look.", "done", [("edit", {"path": "p"})])


def test_a_call_inside_the_reasoning_is_reasoning_without_tools() -> None:
    message = read(ids("I look <tool_call>edit</tool_call> on</think>done"), thinking=True, tools=())
    assert message == Message(reasoning="I look edit on", content="done")


def test_calls_without_arguments() -> None:
    """P68: with and without line ends, next to each other."""
    text = call("get_time") + call("get_time", line="") + "<tool_call>get_time</tool_call>"
    assert [made.arguments for made in read(ids(text)).tool_calls] == ["{}"] * 3


def test_a_truncated_name_makes_no_call() -> None:
    """P68: `get_time` may have been going to be `get_time_zone`."""
    reply = reply_of()
    events = reply.push(Output("", tuple(ids("I ask\n<tool_call>get_time")))) + reply.push(END)
    assert events == [TextDelta("I ask"), TextDelta("\n")]
    assert not reply.ended_in_calls


def test_a_call_without_a_name_is_no_call() -> None:
    assert not read(
        ids("<tool_call>\n<arg_key>path</arg_key><arg_value>p</arg_value></tool_call>")
    ).tool_calls


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_truncated_arguments_never_look_complete(size: int) -> None:
    """P68: cut after every token. An agent that took half of a command for the whole would run it."""
    whole = ids(call("edit", ("path", 'a"\\é🙂'), ("count", "12"), ("text", "\n")))
    complete = '{"path": "a\\"\\\\é🙂", "count": 12, "text": "\\n"}'
    for cut in range(len(whole)):
        reply = reply_of()
        events = [
            event
            for start in range(0, cut, size)
            for event in reply.push(Output("", tuple(whole[start : min(start + size, cut)])))
        ]
        events += reply.push(END)
        assert not reply.ended_in_calls
        assert not [event for event in events if isinstance(event, ToolCallEnd)]
        for made in complete_message(events).tool_calls:
            assert made.arguments.startswith("{")
            assert complete[:-1].startswith(made.arguments.rstrip("\ufffd"))


@pytest.mark.parametrize("place", ["first", "last"])
def test_one_call_that_is_cut_keeps_the_reply_from_ending_in_calls(place: str) -> None:
    """A client that runs the calls of a reply must not meet half of one among them."""
    begun = "<tool_call>edit<arg_key>path</arg_key><arg_value>p</arg_value>"
    texts = [begun, call("get_time")] if place == "first" else [call("get_time"), begun]
    reply = reply_of()
    events = reply.push(Output("", tuple(ids("".join(texts))))) + reply.push(END)
    assert not reply.ended_in_calls
    assert sorted(made.arguments for made in complete_message(events).tool_calls) == ['{"path": "p"', "{}"]


def test_strings_stream_while_they_are_written() -> None:
    """A long file reaches the client as it is written, in fragments that can be closed to valid JSON."""
    reply = reply_of()
    reply.push(Output("", tuple(ids("<tool_call>edit<arg_key>text</arg_key><arg_value>"))))
    seen = ""
    for token_id in spelled('def f(x):\n    return "x"\n'):
        for event in reply.push(Output("", (token_id,))):
            assert isinstance(event, ToolArgumentsDelta)
            seen += event.json_fragment
    assert seen == json.dumps('def f(x):\n    return "x"\n')[1:-1]


def test_arguments_that_repeat_keep_the_first() -> None:
    made = read(ids(call("edit", ("path", "a"), ("path", "b"), ("count", "1")))).tool_calls[0]
    assert made.arguments == '{"path": "a", "count": 1}'
