import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.server.tool_arguments import ToolArguments, allowed_types, typed_value


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", {"string"}, "12"),
        ("12", {"integer"}, 12),
        ("12", {"number"}, 12),
        ("12", {"string", "integer"}, 12),
        ("12", {"string", "null"}, "12"),
        ("null", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        (" true\n", {"boolean"}, True),
        ("True", {"boolean"}, "True"),
        ('"12"', {"string", "null"}, '"12"'),
        ('"12"', None, "12"),
        ("[1, {}]", None, [1, {}]),
        ("[1, {}]", {"object"}, [1, {}]),
        ("[1, {", {"array"}, "[1, {"),
        ("NaN", {"number"}, "NaN"),
        ("Infinity", None, "Infinity"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("", {"integer"}, ""),
        ("if a < b:", None, "if a < b:"),
    ],
)
def test_values_follow_the_schema(text: str, types: set[str] | None, value: object) -> None:
    assert json.loads(typed_value(text, types)) == value


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 1.5, None]}, {"string", "integer", "number", "null"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": "string"}, {"description": "x"}]}, {"string"}),
        ({"$ref": "#/$defs/a"}, {"string"}),
        ({"$ref": "#/$defs/circle"}, None),
        ({"$ref": "#/$defs/nowhere"}, None),
        ({"$ref": "https://example.com/schema"}, None),
        ({"type": 5}, None),
        (True, None),
        (None, None),
    ],
)
def test_types_that_a_schema_allows(schema: object, types: set[str] | None) -> None:
    root = {"$defs": {"a": {"type": "string"}, "circle": {"$ref": "#/$defs/circle"}}}
    assert allowed_types(schema, root) == types


def test_references_that_multiply_are_followed_once() -> None:
    """A schema of a kilobyte must not cost 2^40 look-ups."""
    names = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(40)}
    root = {"$defs": {**names, "n40": {"type": "integer"}}}
    assert allowed_types({"$ref": "#/$defs/n0"}, root) == {"integer"}


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", 'q"']), st.lists(st.text(max_size=6), max_size=4)), max_size=5
    ),
    st.sampled_from(
        [{}, {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, {"properties": 3}]
    ),
    st.booleans(),
)
def test_arguments_are_one_json_object(pairs: list, schema: dict, closed: bool) -> None:
    arguments, written = ToolArguments(schema), ToolArguments.BEGINNING
    for name, texts in pairs:
        written += arguments.open(name) + "".join(map(arguments.push, texts))
        written += arguments.close() if closed else ""
        with pytest.raises(json.JSONDecodeError):
            json.loads(written)
    read_back = json.loads(written + arguments.finish())
    assert list(read_back) == list(dict.fromkeys(name for name, _ in pairs))
