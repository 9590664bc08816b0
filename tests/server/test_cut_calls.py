"""Tool calls that are cut off, as the openai and anthropic clients see them: never as complete ones."""

import json

import openai
import pytest
from pydantic import BaseModel

from tests.server.asking import MODEL, QUESTION, app_of, ask, events
from tests.server.fake_engine import FakeEngine, encode_reply
from tests.server.live_server import live_server

FIRST = "<tool_call>run<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
BEGUN = "<tool_call>run<arg_key>command</arg_key><arg_value>rm -rf /tmp"
REPLY = f"Cleaning.\n{FIRST}{BEGUN}/old STOP it</arg_value></tool_call>"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "times": {"type": "integer"}}}
OPENAI_TOOLS = [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]
ANTHROPIC_TOOLS = [{"name": "run", "input_schema": SCHEMA}]
WITHOUT_THINKING = {"reasoning_effort": "none"}
LENGTH = len(encode_reply(f"Cleaning.\n{FIRST}{BEGUN}"))


class Command(BaseModel):
    command: str


def script(request):
    return "Hello." if "<|observation|>" in request.prompt_text else REPLY


@pytest.fixture(scope="module")
def base():
    with live_server(app_of(FakeEngine(script, burst=2))) as address:
        yield address


def finished(client, streamed: bool, **asked):
    """The completion's one choice."""
    asked = {"model": MODEL, "messages": QUESTION, "tools": OPENAI_TOOLS, **WITHOUT_THINKING, **asked}
    if not streamed:
        return client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.current_completion_snapshot.choices[0]  # the final one raises where a limit cut it


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("cut", "reason", "written"),
    [
        ({"stop": "STOP"}, "stop", '{"command": "rm -rf /tmp/old '),
        ({"stop": ["never", "/old STOP"]}, "stop", '{"command": "rm -rf /tmp'),
        ({"stop": "</arg_value></tool_call>\n"}, "tool_calls", '{"command": "rm -rf /tmp/old STOP it"}'),
        ({"max_tokens": LENGTH}, "length", '{"command": "rm -rf /tmp'),
    ],
)
def test_openai_s_client_gets_a_cut_call_s_arguments_unclosed(chat, streamed, cut, reason, written):
    """P68: closed into JSON, half a command would be run. The stop string itself is not in them."""
    choice = finished(chat, streamed, **cut)
    assert choice.finish_reason == reason
    assert choice.message.content == "Cleaning."
    first, second = choice.message.tool_calls
    assert json.loads(first.function.arguments) == {"command": "ls"}
    assert second.function.arguments == written


def test_openai_s_client_raises_where_it_is_to_read_the_cut_arguments(chat):
    strict = [openai.pydantic_function_tool(Command, name="run")]
    with pytest.raises(openai.LengthFinishReasonError):
        chat.chat.completions.parse(
            model=MODEL, messages=QUESTION, tools=strict, max_tokens=LENGTH, **WITHOUT_THINKING
        )


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on_after_a_cut_call(chat, streamed):
    """The client sends the call back as it got it; what its beginning holds is shown to the model."""
    message = finished(chat, streamed, stop="STOP").message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "no JSON"} for call in message.tool_calls]
    turns = [*QUESTION, message.model_dump(exclude_none=True), *results]
    assert finished(chat, streamed, messages=turns).message.content == "Hello."


CUTS = [
    ({"stop_sequences": ["STOP"]}, "stop_sequence"),
    ({"stop_sequences": ["</tool_call>\n", "rm -rf"]}, "stop_sequence"),
    ({"max_tokens": LENGTH}, "max_tokens"),
]


@pytest.mark.parametrize(("cut", "reason"), CUTS)
def test_anthropic_s_client_gets_no_cut_call_in_a_whole_message(claude, cut, reason):
    asked = {"model": MODEL, "max_tokens": 1000, "messages": QUESTION, "tools": ANTHROPIC_TOOLS, **cut}
    message = claude.messages.create(**asked)
    assert message.stop_reason == reason
    text, call = message.content
    assert (text.text, call.input) == ("Cleaning.", {"command": "ls"})


@pytest.mark.parametrize(("cut", "reason"), CUTS)
def test_anthropic_s_client_reads_no_value_that_was_cut_from_a_stream(claude, cut, reason):
    """The block was begun and cannot be taken back: its JSON stays open, and the stop reason is none for
    which the client's own tool runner runs a call."""
    asked = {"model": MODEL, "max_tokens": 1000, "messages": QUESTION, "tools": ANTHROPIC_TOOLS, **cut}
    with claude.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == reason
    assert [block.input for block in message.content[1:]] == [{"command": "ls"}, {}]


def test_a_stream_of_blocks_stops_the_cut_one():
    asked = {"max_tokens": LENGTH, "messages": QUESTION, "tools": ANTHROPIC_TOOLS, "stream": True}
    told = events(ask(FakeEngine(script), "/v1/messages", asked))
    starts = [event["index"] for event in told if event["type"] == "content_block_start"]
    stops = [event["index"] for event in told if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2]
    parts = [event["delta"]["partial_json"] for event in told if event.get("index") == 2 and "delta" in event]
    assert "".join(parts) == '{"command": "rm -rf /tmp'


@pytest.mark.parametrize(
    ("limit", "reason", "stop_reason"),
    [
        ("stop", "stop", "stop_sequence"),
        ("max_tokens", "length", "max_tokens"),
        (None, "tool_calls", "tool_use"),
    ],
)
def test_only_a_reply_that_ended_by_itself_waits_for_its_calls(limit, reason, stop_reason):
    """The calls before the cut are complete, but more may have been going to come."""
    engine = FakeEngine(f"{FIRST}\nand more")
    most = {"max_tokens": len(encode_reply(FIRST)) + (1 if limit == "max_tokens" else 100)}
    stop = ["more"] if limit == "stop" else []
    body = {"messages": QUESTION, "tools": OPENAI_TOOLS, **WITHOUT_THINKING, **most, "stop": stop}
    choice = ask(engine, "/v1/chat/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == (reason, 1)
    body = {"messages": QUESTION, "tools": ANTHROPIC_TOOLS, **most, "stop_sequences": stop}
    message = ask(engine, "/v1/messages", body).json()
    assert message["stop_reason"] == stop_reason
    assert message["content"][0]["input"] == {"command": "ls"}


@pytest.mark.parametrize("reply", [f"{BEGUN}", f"{BEGUN}{FIRST}", f"{FIRST}{BEGUN}</arg_value>"])
def test_a_call_that_the_model_left_open_is_no_complete_one(reply):
    """Not a limit but the model ended it, or began another call in it: half a command all the same."""
    body = {"messages": QUESTION, "tools": OPENAI_TOOLS, **WITHOUT_THINKING}
    choice = ask(FakeEngine(reply), "/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert any(call["function"]["arguments"][-1] != "}" for call in choice["message"]["tool_calls"])
    body = {"max_tokens": 1000, "messages": QUESTION, "tools": ANTHROPIC_TOOLS}
    message = ask(FakeEngine(reply), "/v1/messages", body).json()
    assert message["stop_reason"] == "end_turn"
    assert [block["input"] for block in message["content"]] == [{"command": "ls"}] * reply.count(FIRST)
