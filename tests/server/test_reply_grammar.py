import json

import llguidance
import pytest

from megaspan.engine.sampling import Grammar
from megaspan.server.chat import render
from tests.server.chat_requests import (
    ASK,
    END_THINK,
    JSON_SCHEMA,
    SCHEMA,
    TOKENIZER,
    TOOLS,
    ids,
)
from tests.server.replies import read


class Vocabulary:
    """What llguidance asks of a tokenizer."""

    eos_token_id = TOKENIZER.special("<|endoftext|>")
    bos_token_id = None
    special_token_ids = tuple(TOKENIZER.special_tokens.values())
    tokens = tuple(
        b"\xff" + piece if piece.decode(errors="replace") in TOKENIZER.special_tokens else piece
        for piece in TOKENIZER.token_bytes
    )

    def __call__(self, text: str) -> list[int]:
        return TOKENIZER.encode(text)


VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()), TOKENIZER.vocab_size)


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether the grammar lets the reply through, to its end."""
    assert grammar is not None
    compiled = {
        "lark": lambda: grammar.text,
        "json_schema": lambda: llguidance.LLMatcher.grammar_from_json_schema(grammar.text),
    }[grammar.kind]()
    matcher = llguidance.LLMatcher(VOCABULARY, compiled, log_level=0)
    assert not matcher.get_error()
    return all(matcher.consume_token(number) for number in ids(text)) and matcher.is_accepting()


FULL_CALL = (
    '<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a < "b"\n</arg_value>\n'
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n<arg_key>mode</arg_key>\n<arg_value>all</arg_value>\n"
    "</tool_call>"
)
SHORT_CALL = "<tool_call>edit<arg_key>path</arg_key><arg_value></arg_value></tool_call>"


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (FULL_CALL, True),
        (f"\n{FULL_CALL}\n{SHORT_CALL}\n", True),
        ("<tool_call>now</tool_call>", True),
        ("<tool_call>now\n</tool_call>", True),
        ("<tool_call>free\n<arg_key>any</arg_key>\n<arg_value>thing</arg_value>\n</tool_call>", True),
        ("", False),
        ("hello", False),
        ("<tool_call>edit</tool_call>", False),
        ("<tool_call>other</tool_call>", False),
        ("<tool_call>now<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>", False),
        (FULL_CALL.replace(">3<", ">three<"), False),
        (FULL_CALL.replace(">all<", ">some<"), False),
        (FULL_CALL + "and more", False),
        (FULL_CALL.replace("a <", "a </think>"), False),
    ],
)
def test_a_required_call_is_one_that_the_tools_allow(reply: str, right: bool) -> None:
    prompt = render(TOKENIZER, ASK, TOOLS, "required")
    assert prompt.grammar is not None
    assert prompt.grammar.begins_after == END_THINK
    assert accepts(prompt.grammar, reply) == right
    if right:
        reply_message = read(ids(reply), tools=prompt.tools)
        assert all(isinstance(json.loads(call.arguments), dict) for call in reply_message.tool_calls)
        assert reply_message.content == ""


def test_a_named_call_is_that_one() -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    prompt = render(TOKENIZER, ASK, TOOLS, choice, reasoning_effort="none")
    assert prompt.grammar is not None
    assert prompt.grammar.begins_after is None
    assert accepts(prompt.grammar, "<tool_call>now</tool_call>")
    assert not accepts(prompt.grammar, FULL_CALL)


@pytest.mark.parametrize("schema", [True, {"enum": 3}, {"type": "string", "enum": ["x", 3]}])
def test_a_required_call_may_have_odd_schemas_for_its_arguments(schema: object) -> None:
    """JSON schema has `true` for any value; an `enum` that is no list says nothing."""
    odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    prompt = render(TOKENIZER, ASK, [odd], "required", reasoning_effort="none")
    assert prompt.grammar is not None
    assert accepts(prompt.grammar, "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>")


def test_one_call_when_calls_may_not_be_parallel() -> None:
    prompt = render(TOKENIZER, ASK, TOOLS, "required", parallel_tool_calls=False)
    assert accepts(prompt.grammar, FULL_CALL)
    assert not accepts(prompt.grammar, FULL_CALL + SHORT_CALL)


def test_a_response_format_leaves_the_calls_possible() -> None:
    prompt = render(TOKENIZER, ASK, TOOLS, response_format=JSON_SCHEMA)
    assert accepts(prompt.grammar, '{"n": 3}')
    assert accepts(prompt.grammar, FULL_CALL)
    assert not accepts(prompt.grammar, '{"n": "x"}')
    assert render(TOKENIZER, ASK, TOOLS, "none", response_format=JSON_SCHEMA).grammar == Grammar(
        "json_schema", json.dumps(SCHEMA), END_THINK
    )
