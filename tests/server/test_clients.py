"""The openai and anthropic Python clients against a true server."""

import json

import anthropic
import openai
import pytest

from tests.server.asking import MODEL, QUESTION, app_of
from tests.server.fake_engine import LOGPROB, FakeEngine
from tests.server.live_server import live_server

CALL = "Reading.\n<tool_call>read_file<arg_key>path</arg_key><arg_value>a.py</arg_value></tool_call>"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
OPENAI_TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}]
ANTHROPIC_TOOLS = [{"name": "read_file", "description": "Reads.", "input_schema": SCHEMA}]


def script(request):
    """A tool call where tools are offered and no result is there yet, JSON where a grammar asks for it."""
    if request.params.grammar is not None:
        answer = '{"path": "a.py"}'
    elif "read_file" in request.prompt_text and "<|observation|>" not in request.prompt_text:
        answer = CALL
    else:
        answer = "Hello, wörld 🙂"
    return ("Hm.</think>\n" if request.prompt_text.endswith("<think>") else "") + answer


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(script)


@pytest.fixture(scope="module")
def base(engine):
    with live_server(app_of(engine, api_keys=("key",))) as address:
        yield address


def test_openai_chat_whole_and_streamed(chat):
    whole = chat.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == "Hello, wörld 🙂"
    assert whole.choices[0].message.reasoning_content == "Hm."
    assert whole.choices[0].logprobs.content[0].logprob == LOGPROB
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = chat.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, wörld 🙂"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_tools_through_two_turns(chat):
    with chat.chat.completions.stream(model=MODEL, messages=QUESTION, tools=OPENAI_TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("read_file", {"path": "a.py"})
    turn = [*QUESTION, message.model_dump(exclude_none=True)]
    turn.append({"role": "tool", "tool_call_id": call.id, "content": "print(1)"})
    answer = chat.chat.completions.create(model=MODEL, messages=turn, tools=OPENAI_TOOLS)
    assert answer.choices[0].message.content == "Hello, wörld 🙂"
    assert answer.choices[0].finish_reason == "stop"


def test_openai_structured_output_and_choices(chat, engine):
    wanted = {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA}}
    answer = chat.chat.completions.create(model=MODEL, messages=QUESTION, response_format=wanted, n=2)
    assert [json.loads(choice.message.content) for choice in answer.choices] == [{"path": "a.py"}] * 2
    assert json.loads(engine.submitted[-1].params.grammar.text) == SCHEMA


def test_openai_completions_and_models(chat):
    assert [model.id for model in chat.models.list()] == [MODEL]
    assert chat.models.retrieve(MODEL).id == MODEL
    answer = chat.completions.create(model=MODEL, prompt="def f(", max_tokens=5, logprobs=1)
    assert len(answer.choices[0].logprobs.tokens) == 5
    stream = chat.completions.create(model=MODEL, prompt="def f(", max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, wörld 🙂"


def test_openai_errors_have_their_classes(chat, base):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt"):
        chat.chat.completions.create(model="gpt", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="context"):
        chat.completions.create(model=MODEL, prompt="a b " * 2000)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{base}/v1", api_key="wrong", max_retries=0).models.list()


def test_anthropic_messages_whole_and_streamed(claude):
    asked = {"model": MODEL, "max_tokens": 50, "messages": QUESTION, "system": "Be brief."}
    whole = claude.messages.create(**asked)
    assert [block.text for block in whole.content] == ["Hello, wörld 🙂"]
    assert whole.usage.cache_read_input_tokens == 0
    with claude.messages.stream(**asked, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        assert "".join(stream.text_stream) == "Hello, wörld 🙂"
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Hm."
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > whole.usage.output_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens


def test_anthropic_tools_through_two_turns(claude):
    asked = {"model": MODEL, "max_tokens": 100, "tools": ANTHROPIC_TOOLS}
    with claude.messages.stream(**asked, messages=QUESTION) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    text, call = message.content
    assert (text.text, call.name, call.input) == ("Reading.", "read_file", {"path": "a.py"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "print(1)"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(**asked, messages=turns).content[0].text == "Hello, wörld 🙂"


def test_anthropic_errors_have_their_classes(claude, base):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model=MODEL, max_tokens=0, messages=QUESTION)
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        claude.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    stranger = anthropic.Anthropic(base_url=base, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=MODEL, max_tokens=1, messages=QUESTION)
    assert [model.id for model in claude.models.list()] == [MODEL]
