"""Structured output: whatever the logits are, what is drawn fits the grammar."""

import json
import re

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megaspan.engine.sampling import Grammar
from tests.engine.grammars import COMPILER, EOS, allowed, follow, sampled_text

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": -3, "maximum": 40},
        "kind": {"enum": ["a", "b c", "</think>"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
ARITHMETIC = """
start: sum
sum: product ("+" product){0,2}
product: NUMBER ("*" NUMBER){0,2}
NUMBER: /[1-9][0-9]{0,2}/
"""
OPTIONS = ["yes", "yes, but", 'say "no"', "a\nb\\d/|", "日本😀"]


@pytest.mark.parametrize("seed", range(25))
def test_random_logits_give_what_the_schema_says(seed):
    text = sampled_text(Grammar("json_schema", json.dumps(SCHEMA)), seed)
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("seed", range(5))
def test_random_logits_give_what_the_expression_the_grammar_and_the_choice_say(seed):
    text = sampled_text(Grammar("regex", r"[ab]{2,5}-[0-9]{1,9}/é?"), seed)
    assert text is not None
    assert re.fullmatch(r"[ab]{2,5}-[0-9]+/é?", text)
    text = sampled_text(Grammar("lark", ARITHMETIC), seed)
    assert text is not None
    assert re.fullmatch(r"[0-9]+([+*][0-9]+)*", text)
    assert sampled_text(Grammar.choice(OPTIONS), seed) in OPTIONS


names = st.text('abc_ "\\é/', min_size=1, max_size=4)
values = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), names)
scalars = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 4)),
    st.builds(
        lambda least, span: {"type": "integer", "minimum": least, "maximum": least + span},
        st.integers(-150, 150),
        st.integers(0, 99),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.builds(lambda options: {"enum": options}, st.lists(values, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, values),
)


def containers(inner):
    objects = st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=4).map(
        lambda members: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in members.items()},
            "required": [name for name, (_, required) in members.items() if required],
            "additionalProperties": False,
        }
    )
    arrays = st.builds(
        lambda items, least, more: {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return objects | arrays | st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})


@settings(max_examples=60)
@given(st.recursive(scalars, containers, max_leaves=6), st.integers(0, 2**32))
def test_what_a_random_schema_gives_is_valid(schema, seed):
    text = sampled_text(Grammar("json_schema", json.dumps(schema)), seed)
    assume(text is not None)
    assert text is not None
    jsonschema.validate(json.loads(text), schema)


def test_each_choice_can_come():
    for option in OPTIONS:
        state = COMPILER.compile(Grammar.choice(OPTIONS))
        assert follow(state, option)
        assert set(EOS) <= allowed(state)


def test_any_object_is_json():
    state = COMPILER.compile(Grammar("json"))
    assert follow(state, '{"a": [1, {"b": null}], "c": "x"}')
    assert state.finished
    for text in ("[", "3", '"a"', "```"):
        assert not follow(COMPILER.compile(Grammar("json")), text)


def test_blanks_cannot_go_on_for_ever():
    state = COMPILER.compile(Grammar("json"))
    assert follow(state, "{" + "\n" * 20)
    assert not follow(state, "\n" * 20)


def members(count: int, required: bool = False) -> dict:
    kinds = (
        {"type": "string", "maxLength": 3},
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"const": 1},
    )
    properties = {f"property_{number}": kinds[number % 3] for number in range(count)}
    listed = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": listed, "additionalProperties": False}


def branches(count: int) -> list[dict]:
    return [
        {
            "type": "object",
            "properties": {"kind": {"const": f"kind_{number}"}, f"value_{number}": {"type": "boolean"}},
            "required": ["kind", f"value_{number}"],
            "additionalProperties": False,
        }
        for number in range(count)
    ]


def nested(depth: int) -> dict:
    schema: dict = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        schema["additionalProperties"] = False
    return schema


LARGE = {
    "500 optional properties": members(500),
    "40 required properties": members(40, required=True),
    "anyOf of 200": {"anyOf": branches(200)},
    "oneOf of 200": {"type": "array", "items": {"oneOf": branches(200)}, "minItems": 1, "maxItems": 2},
    "overlapping branches": {"anyOf": [members(20 + number) for number in range(30)]},
    "nested 50 deep": nested(50),
    "enum of 5,000": {"enum": [f"value {number * 7919 % 100003}" for number in range(5000)]},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_work(name):
    """Where many things may come next, as after a comma, a mask takes the most."""
    grammar = Grammar("json_schema", json.dumps(LARGE[name]))
    texts = [sampled_text(grammar, seed, most=1500) for seed in range(2)]
    assert any(texts)
    for text in filter(None, texts):
        jsonschema.validate(json.loads(text), LARGE[name])
