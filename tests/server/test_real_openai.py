"""The openai Python client against the true engine on a small random model."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.asking import MODEL, QUESTION
from tests.server.fake_engine import shipped_tokenizer
from tests.server.small_model import LEVELS, LONG_TEXT, check_levels

pytestmark = pytest.mark.usefixtures("nothing_is_left")
NAMED = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
OPENAI_TOOLS: Any = [
    {"type": "function", "function": {"name": "set_level", "parameters": LEVELS}},
    {"type": "function", "function": {"name": "note", "parameters": NAMED}},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "even": {"type": "boolean"}},
    "required": ["name", "even"],
    "additionalProperties": False,
}
QUICK: Any = {"model": MODEL, "reasoning_effort": "none"}


@pytest.fixture(scope="module")
def chat(real_base):
    with openai.OpenAI(base_url=f"{real_base}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_streamed_and_whole_are_the_same_text_by_the_same_seed(chat):
    asked = {**QUICK, "messages": QUESTION, "max_tokens": 24, "seed": 7}
    whole = chat.chat.completions.create(**asked)
    chunks = list(chat.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    other = chat.chat.completions.create(**{**asked, "seed": 8})
    assert other.choices[0].message.content != whole.choices[0].message.content


def test_a_second_turn_finds_the_first_in_the_cache(chat):
    """P71: and the usage says so."""
    messages = [{"role": "user", "content": LONG_TEXT}]
    first = chat.chat.completions.create(**QUICK, messages=messages, max_tokens=8)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    reply = {"role": "assistant", "content": first.choices[0].message.content}
    turn = [*messages, reply, {"role": "user", "content": "again"}]
    second = chat.chat.completions.create(**QUICK, messages=turn, max_tokens=8)
    assert first.usage.prompt_tokens - 32 < second.usage.prompt_tokens_details.cached_tokens


def test_reasoning_is_apart_from_the_text(chat):
    answer = chat.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8)
    assert answer.choices[0].message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


def test_a_required_call_is_a_call_even_from_a_random_model(chat):
    for seed in range(3):
        answer = chat.chat.completions.create(
            **QUICK,
            messages=QUESTION,
            tools=OPENAI_TOOLS[:1],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=200,
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "set_level"
        check_levels(json.loads(call.function.arguments))


def test_a_named_call_that_is_cut_off_does_not_look_complete(chat):
    """P68: a random model does not end its string, so max_tokens does."""
    named: Any = {"type": "function", "function": {"name": "note"}}
    asked = {"messages": QUESTION, "tools": OPENAI_TOOLS, "tool_choice": named, "max_tokens": 24, "seed": 0}
    with chat.chat.completions.stream(**QUICK, **asked) as stream:
        for _ in stream:
            pass
        choice = stream.current_completion_snapshot.choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "note"
    assert json.loads(call.function.arguments + '"}')["text"]


@pytest.mark.parametrize("thinking", [False, True])
def test_structured_output_is_an_instance_of_the_schema(chat, thinking):
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    how = {"reasoning_effort": "high", "max_tokens": 2000} if thinking else {"max_tokens": 200}
    if thinking:  # a random model would think for ever
        how["logit_bias"] = {str(shipped_tokenizer().special("</think>")): 100}
    answer = chat.chat.completions.create(
        **{**QUICK, **how}, messages=QUESTION, response_format=wanted, seed=1
    )
    assert answer.choices[0].finish_reason == "stop"
    content = json.loads(answer.choices[0].message.content)
    assert content.keys() == {"name", "even"}
    assert (type(content["name"]), type(content["even"])) == (str, bool)
    assert len(content["name"]) <= 8


def test_log_probabilities_are_the_models_own(chat):
    """At temperature 0 the drawn token is the likeliest, and its log-probability heads the alternatives."""
    answer = chat.chat.completions.create(
        **QUICK, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for token in content:
        alternatives = [other.logprob for other in token.top_logprobs]
        assert len(alternatives) == 3
        assert alternatives == sorted(alternatives, reverse=True)
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == pytest.approx(alternatives[0], abs=1e-5)
        assert token.logprob < 0


def test_choices_differ_and_come_again_by_the_seed(chat):
    def texts() -> list[str]:
        answer = chat.chat.completions.create(**QUICK, messages=QUESTION, n=2, seed=5, max_tokens=12)
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert first[0] != first[1]
    assert texts() == first


def test_a_stop_string_ends_the_text_and_is_not_in_it(chat):
    asked = {"model": MODEL, "prompt": "import ", "temperature": 0, "max_tokens": 24}
    whole = chat.completions.create(**asked).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    answer = chat.completions.create(**asked, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]
    streamed = chat.completions.create(**asked, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.text


def test_completions_of_ids_and_of_texts_and_with_echo(chat):
    tokens = httpx.post(f"{chat.base_url}".replace("/v1/", "/tokenize"), json={"text": "import os"}).json()
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 5}
    answer = chat.completions.create(**asked, prompt=["import os", "import re"], echo=True)
    assert [choice.text[:9] for choice in answer.choices] == ["import os", "import re"]
    same = chat.completions.create(**asked, prompt=tokens["tokens"])
    assert "import os" + same.choices[0].text == answer.choices[0].text


def test_what_cannot_be_served_is_a_client_error(chat):
    """P27: and the next request is served."""
    bad: list[Any] = [
        {"prompt": "a b " * 5000},
        {"prompt": [12288]},
        {"prompt": "x", "extra_body": {"guided_regex": "("}},
        {"prompt": "x", "extra_body": {"structured_outputs": {"json": {"type": "nothing"}}}},
        {"prompt": "x", "logit_bias": {"12288": 1}},
    ]
    for arguments in bad:
        with pytest.raises(openai.BadRequestError):
            chat.completions.create(**{"model": MODEL, "max_tokens": 4, **arguments})
    assert chat.completions.create(model=MODEL, prompt="x", max_tokens=4).usage.completion_tokens
