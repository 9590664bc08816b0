"""Tools and calls that no careful client sends: an answer, and never a 500."""

import json
import time

import pytest

from megaspan.server.chat_messages import check_messages
from tests.server.asking import ask, events
from tests.server.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
ASKING = {"role": "user", "content": "go on"}


def call(call_id, name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def tool(properties):
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": properties}},
    }


@pytest.mark.parametrize("call_id", [["a"], {"a": 1}, 7, True, None, "", "unknown", "\ue000"], ids=repr)
def test_ids_of_tool_results_may_be_anything(call_id):
    """A list or an object is no key of a dictionary."""
    messages = [
        ASKING,
        {"role": "assistant", "content": None, "tool_calls": [call("a"), call(call_id)]},
        {"role": "tool", "tool_call_id": call_id, "content": "first"},
        {"role": "tool", "tool_call_id": "a", "content": "second"},
    ]
    engine = FakeEngine("</think>fine")
    assert ask(engine, PATH, {"messages": messages}).status_code == 200
    prompt = engine.submitted[0].prompt_text
    assert "first" in prompt
    assert "second" in prompt


@pytest.mark.parametrize("enum", ["abc", 7, None, {"a": 1}, [[1], {"b": 2}], []], ids=repr)
@pytest.mark.parametrize("stream", [False, True])
def test_an_enum_may_be_no_list(enum, stream):
    reply = "</think><tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    body = {"messages": [ASKING], "tools": [tool({"a": {"enum": enum}})], "stream": stream}
    response = ask(FakeEngine(reply), PATH, body)
    assert response.status_code == 200
    if stream:
        assert all("error" not in event for event in events(response)[:-1])


@pytest.mark.parametrize("value", ["1e999", "-1e999", r'"\ud800"', r'{"k": "\udfff"}', "NaN", "[" * 3000])
@pytest.mark.parametrize("kind", [{}, {"type": "number"}, {"type": "object"}, {"type": "string"}])
def test_a_call_with_what_json_cannot_carry_is_json_all_the_same(value, kind):
    """1e999 is an infinity and half a pair is no text: both failed when the answer was written."""
    reply = f"</think><tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    body = {"messages": [ASKING], "tools": [tool({"a": kind})]}
    engine = FakeEngine(reply, max_context=1 << 14)
    (made,) = ask(engine, PATH, body).json()["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(made["function"]["arguments"])
    json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    tools = [{"name": "f", "input_schema": body["tools"][0]["function"]["parameters"]}]
    body = {"messages": [ASKING], "tools": tools, "max_tokens": 8000, "thinking": {"type": "enabled"}}
    (block,) = ask(engine, "/v1/messages", body).json()["content"]
    assert block["input"] == arguments == {"a": value}


@pytest.mark.parametrize(
    "arguments", ['{"a": 1e999}', r'{"a": "\ud800"}', '{"a": NaN}', '{"a": [', "[1]", "7"]
)
def test_a_past_calls_arguments_are_rendered_or_refused(arguments):
    past = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    response = ask(FakeEngine("</think>fine"), PATH, {"messages": [ASKING, past, ASKING]})
    assert response.status_code in (200, 400)


def test_many_results_are_put_in_their_calls_order_in_linear_time():
    count = 20_000
    calls = [{"role": "assistant", "content": None, "tool_calls": [call(str(i)) for i in range(count)]}]
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"<{i}>"} for i in reversed(range(count))]
    before = time.process_time()
    checked = check_messages([ASKING, *calls, *results])
    assert time.process_time() - before < 1
    assert [message["content"] for message in checked[2:]] == [f"<{i}>" for i in range(count)]
