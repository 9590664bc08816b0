"""`/v1/messages`: blocks, events in their order, usage, errors in Anthropic's shape."""

import json

import pytest

from tests.server.asking import MODEL, QUESTION, app_of, ask, events
from tests.server.fake_engine import FakeEngine, encode_reply

PATH = "/v1/messages"
BODY = {"model": MODEL, "max_tokens": 100, "messages": QUESTION}
TOOL = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}
CALLS = (
    "<think>Sum.</think>\nAdding.\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
    "<arg_key>b</arg_key><arg_value>two</arg_value></tool_call><tool_call>add</tool_call>"
)


def test_a_message_is_text_with_usage():
    response = ask(FakeEngine(), PATH, BODY).json()
    assert (response["type"], response["role"], response["model"]) == ("message", "assistant", MODEL)
    assert response["content"] == [{"type": "text", "text": "Hello there, wörld! 🙂"}]
    assert (response["stop_reason"], response["stop_sequence"]) == ("end_turn", None)
    assert response["usage"]["output_tokens"] == len(encode_reply("Hello there, wörld! 🙂")) + 1


def test_cached_tokens_are_counted_apart():
    engine = FakeEngine()
    body = {**BODY, "messages": [{"role": "user", "content": "hello " * 200}]}
    usage = ask(engine, PATH, body).json()["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["cache_read_input_tokens"] + usage["input_tokens"] == len(engine.submitted[0].prompt)


def test_thinking_comes_only_when_asked_for():
    """A client that never heard of thinking takes the first block for the answer."""
    engine = FakeEngine()
    asked = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    kinds = [block["type"] for block in ask(engine, PATH, asked).json()["content"]]
    assert kinds == ["thinking", "text"]
    assert [block["type"] for block in ask(engine, PATH, BODY).json()["content"]] == ["text"]


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_streamed_events_build_the_whole_message(burst):
    """P68: blocks one after the other, each started, filled and stopped."""
    body = {**BODY, "tools": [TOOL]}
    whole = ask(FakeEngine(CALLS), PATH, body).json()
    told = events(ask(FakeEngine(CALLS, burst=burst), PATH, {**body, "stream": True}))
    assert [event["type"] for event in told[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    blocks, texts, is_open = [], [], False
    for event in told[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                texts.append("")
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                texts[-1] += next(value for name, value in event["delta"].items() if name != "type")
            case "content_block_stop":
                is_open = False
    assert not is_open
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert texts[:2] == ["Sum.", "Adding."]
    assert [json.loads(text) for text in texts[2:]] == [{"a": 1, "b": "two"}, {}]
    assert [block.get("input") for block in whole["content"][2:]] == [{"a": 1, "b": "two"}, {}]
    assert whole["stop_reason"] == told[-2]["delta"]["stop_reason"] == "tool_use"
    assert told[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": [" there"]}, "stop_sequence", " there"),
        ({}, "end_turn", None),
    ],
)
def test_stop_reasons(fields, reason, sequence):
    response = ask(FakeEngine(), PATH, {**BODY, **fields}).json()
    assert (response["stop_reason"], response["stop_sequence"]) == (reason, sequence)
    if sequence:
        assert response["content"][0]["text"] == "Hello"


def test_tokens_are_counted_as_the_prompt_has_them():
    engine = FakeEngine()
    body = {"messages": QUESTION, "system": "Be brief.", "tools": [TOOL]}
    count = ask(engine, f"{PATH}/count_tokens", body).json()["input_tokens"]
    ask(engine, PATH, {**body, "max_tokens": 1})
    assert count == len(engine.submitted[0].prompt)


def test_a_coding_agents_extra_fields_are_passed_over():
    extras = {
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }
    assert ask(FakeEngine(), f"{PATH}?beta=true", {**BODY, **extras}).status_code == 200


def test_a_schema_becomes_a_grammar():
    engine = FakeEngine()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {**BODY, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert ask(engine, PATH, body).status_code == 200
    grammar = engine.submitted[0].params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error"),
        ({"thinking": {"type": "sometimes"}}, 400, "invalid_request_error"),
        ({"temperature": -1}, 400, "invalid_request_error"),
        ({"model": "claude"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "a b " * 2000}]}, 400, "invalid_request_error"),
    ],
)
def test_refusals_have_anthropics_shape(fields, status, kind):
    response = ask(FakeEngine(), PATH, {**BODY, **fields})
    assert response.status_code == status
    content = response.json()
    assert content["type"] == "error"
    assert content["error"]["type"] == kind
    assert "\n" not in content["error"]["message"]


def test_an_error_in_mid_stream_is_an_event():
    last = events(ask(FakeEngine(failing="internal"), PATH, {**BODY, "stream": True}))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_a_key_is_refused_in_anthropics_shape():
    response = ask(app_of(FakeEngine(), api_keys=("k",)), PATH, BODY)
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert ask(app_of(FakeEngine(), api_keys=("k",)), PATH, BODY, headers={"x-api-key": "k"}).is_success
