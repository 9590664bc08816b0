"""`/v1/chat/completions`: its answers, whole and in chunks, and what it refuses."""

import json

import pytest

from megaspan.engine.sampling import Grammar
from tests.server.asking import MODEL, QUESTION, app_of, ask, events
from tests.server.fake_engine import LOGPROB, FakeEngine, encode_reply

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["path"],
        },
    },
}
CALL = (
    "To the file.</think>\nReading.\n<tool_call>read_file<arg_key>path</arg_key><arg_value>a.py</arg_value>"
    "<arg_key>lines</arg_key><arg_value>3</arg_value></tool_call>"
)


def deltas(chunks, index=0):
    """The deltas of one choice put together as a client does it."""
    whole = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for name in ("content", "reasoning_content"):
                whole[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls", []):
                known = whole["tool_calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
                known.setdefault("id", call.get("id"))
    return whole


def test_a_reply_has_reasoning_content_and_usage():
    engine = FakeEngine()
    response = ask(engine, PATH, {"model": MODEL, "messages": QUESTION}).json()
    choice = response["choices"][0]
    assert choice["message"]["content"] == "Hello there, wörld! 🙂"
    assert choice["message"]["reasoning_content"] == "A thought."
    assert choice["finish_reason"] == "stop"
    prompt = engine.submitted[0].prompt
    drawn = len(encode_reply("A thought.</think>\nHello there, wörld! 🙂")) + 1
    assert response["usage"]["prompt_tokens"] == len(prompt)
    assert response["usage"]["completion_tokens"] == drawn
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_cached_tokens_are_shown():
    """P71: a user must be able to see whether a prefix was reused."""
    messages = [{"role": "user", "content": "hello " * 200}]
    usage = ask(FakeEngine(), PATH, {"messages": messages}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 64 * 64 > 0


@pytest.mark.parametrize("burst", [1, 2, 3, 50])
def test_a_stream_says_what_the_whole_reply_says(burst):
    """P68: however many tokens come at once."""
    body = {"messages": QUESTION, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(ask(FakeEngine(CALL, burst=burst), PATH, body))
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(encode_reply(CALL)) + 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "tool_calls"]
    whole = deltas(chunks)
    assert (whole["reasoning_content"], whole["content"]) == ("To the file.", "Reading.")
    assert whole["tool_calls"][0]["name"] == "read_file"
    assert json.loads(whole["tool_calls"][0]["arguments"]) == {"path": "a.py", "lines": 3}
    message = ask(FakeEngine(CALL), PATH, {**body, "stream": False, "stream_options": None}).json()[
        "choices"
    ][0]
    assert message["finish_reason"] == "tool_calls"
    assert message["message"]["tool_calls"][0]["function"]["arguments"] == whole["tool_calls"][0]["arguments"]


def test_without_tools_text_with_angle_brackets_is_left_alone():
    """P69."""
    text = "if a < b: print('<tool_calls>')"
    body = {"messages": QUESTION, "reasoning_effort": "none"}
    message = ask(FakeEngine(text), PATH, body).json()["choices"][0]["message"]
    assert message["content"] == text
    assert "tool_calls" not in message


def test_special_tokens_never_appear_in_content():
    text = "a<|user|>b<|endoftext|>c"
    body = {"messages": QUESTION, "reasoning_effort": "none"}
    assert ask(FakeEngine(text), PATH, body).json()["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_have_seeds_of_their_own(stream):
    engine = FakeEngine(lambda request: f"</think>{request.params.seed}")
    body = {"messages": QUESTION, "n": 3, "seed": 5, "stream": stream}
    response = ask(engine, PATH, body)
    if stream:
        chunks = events(response)[:-1]
        contents = [deltas(chunks, index)["content"] for index in range(3)]
    else:
        contents = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert contents == ["5", "6", "7"]
    assert not engine.running


def test_log_probabilities_cover_each_token_once():
    engine = FakeEngine("</think>" + "a wörld", burst=2)
    body = {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = ask(engine, PATH, body).json()
    content = whole["choices"][0]["logprobs"]["content"]
    ids = encode_reply("</think>a wörld<|endoftext|>")
    assert whole["choices"][0]["token_ids"] == ids
    assert whole["prompt_token_ids"] == engine.submitted[0].prompt
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == "</think>a wörld<|endoftext|>"
    assert {each["logprob"] for each in content} == {LOGPROB}
    assert [each["logprob"] for each in content[0]["top_logprobs"]] == [LOGPROB, LOGPROB - 1]
    chunks = events(ask(engine, PATH, {**body, "stream": True}))[:-1]
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in streamed for token in choice["token_ids"]] == ids
    told = [each for choice in streamed for each in (choice["logprobs"] or {"content": []})["content"]]
    assert told == content


@pytest.mark.parametrize("burst", [1, 4, 100])
def test_a_stop_string_never_shows(burst):
    engine = FakeEngine("</think>one two three four", burst=burst)
    body = {"messages": QUESTION, "stop": ["two th"], "stream": True}
    chunks = events(ask(engine, PATH, body))[:-1]
    assert deltas(chunks)["content"] == "one "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "two th"


def test_a_held_beginning_of_a_stop_string_is_given_out_at_the_end():
    body = {"messages": QUESTION, "stop": "two three", "max_tokens": 4}
    choice = ask(FakeEngine("</think>one two"), PATH, body).json()["choices"][0]
    assert choice["message"]["content"] == "one two"


def test_sampling_values_reach_the_engine():
    engine = FakeEngine()
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "seed": 3,
    }
    body = {"messages": QUESTION, "max_completion_tokens": 9, "logit_bias": {"7": -3}, "stop": "x", **asked}
    assert ask(engine, PATH, body).status_code == 200
    params = engine.submitted[0].params
    assert {name: getattr(params, name) for name in asked} == {**asked, "stop_token_ids": (5,)}
    assert params.logit_bias == ((7, -3.0),)
    assert (params.max_tokens, params.stop) == (9, ("x",))


def test_more_tokens_than_the_context_holds_are_cut_to_what_it_holds():
    engine = FakeEngine(max_context=100)
    assert ask(engine, PATH, {"messages": QUESTION, "max_tokens": 100_000}).status_code == 200
    assert engine.submitted[0].params.max_tokens == 100 - len(engine.submitted[0].prompt)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["x", "y"]}}, Grammar.choice(["x", "y"])),
        ({"structured_outputs": {"json": {"type": "object"}}}, Grammar("json_schema", '{"type": "object"}')),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar("lark", "start: /a/")),
    ],
)
def test_structured_output_holds_from_the_end_of_the_reasoning(fields, grammar):
    """P70: what comes before `</think>` is free."""
    engine = FakeEngine()
    assert ask(engine, PATH, {"messages": QUESTION, **fields}).status_code == 200
    assert ask(engine, PATH, {"messages": QUESTION, "reasoning_effort": "none", **fields}).status_code == 200
    thinking, direct = (request.params.grammar for request in engine.submitted)
    assert direct == grammar
    end = engine.tokenizer.special("</think>")
    assert thinking == Grammar(grammar.kind, grammar.text, begins_after=end)


def test_fields_that_change_nothing_are_passed_over():
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "functions": None,
        "modalities": ["text"],
    }
    assert ask(FakeEngine(), PATH, {"messages": QUESTION, **harmless}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"n": 0}, "n", "from 1 to 8"),
        ({"n": 9}, "n", "from 1 to 8"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: Input"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": ""}, "stop", "empty"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        ({"reasoning_effort": "very"}, "reasoning_effort", "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs", "one"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "another"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"12288": 1}}, "logit_bias", "12287"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
        ({"model": "gpt"}, "model", "span-code"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(fields, param, words):
    engine = FakeEngine()
    response = ask(engine, PATH, {"messages": QUESTION, **fields})
    assert response.status_code == (404 if "model" in fields else 400)
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert not engine.submitted


def test_a_prompt_over_the_context_is_refused_and_the_next_one_served():
    """P27: at once, and blocking nobody."""
    engine = FakeEngine(max_context=50)
    app = app_of(engine)
    long = [{"role": "user", "content": "a b " * 100}]
    refused = ask(app, PATH, {"messages": long})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert ask(app, PATH, {"messages": QUESTION}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_told_in_the_protocols_shape(stream):
    response = ask(FakeEngine(failing="internal"), PATH, {"messages": QUESTION, "stream": stream})
    if stream:
        assert "no numbers" in events(response)[-1]["error"]["message"]
    else:
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"


def test_a_grammar_that_leads_nowhere_is_the_clients_error():
    response = ask(FakeEngine(failing="grammar"), PATH, {"messages": QUESTION, "guided_regex": "a"})
    assert response.status_code == 400
