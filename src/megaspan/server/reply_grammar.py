"""Grammars of whole replies: an answer in JSON, tool calls as GLM writes them, or either.

In Lark's notation as llguidance reads it, where `<[7]>` is the token with id 7: the markers of a call are
special tokens, which text cannot spell, so a value may hold any text at all.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaspan.engine.sampling import Grammar
from megaspan.errors import UserError
from megaspan.server.markers import CALLING, Marker
from megaspan.server.tool_arguments import allowed_types
from megaspan.tokenizer import Tokenizer

TERMINALS = 'BREAK: "\\n"\nTEXT: /(?s:.*)/\nKEY: /[^\\n]+/\n'


def answer_grammar(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def calls_grammar(tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], parallel: bool) -> Grammar:
    """At least one call of the tools; exactly one unless `parallel`."""
    return Grammar("lark", f"start: {_count(parallel)}\n" + _call_rules(tokenizer, tools))


def answer_or_calls_grammar(
    tokenizer: Tokenizer, answer: Grammar, tools: Sequence[dict[str, Any]], parallel: bool
) -> Grammar:
    """JSON as `answer` asks for it, or calls."""
    schema = answer.text if answer.kind == "json_schema" else '{"type": "object"}'
    start = f"start: answer | {_count(parallel)}\nanswer: BREAK? %json {schema}\n"
    return Grammar("lark", start + _call_rules(tokenizer, tools))


def _count(parallel: bool) -> str:
    return "call+ BREAK?" if parallel else "call BREAK?"


def _call_rules(tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> str:
    token = _marker_tokens(tokenizer)
    names = " | ".join(f"tool_{number}" for number in range(len(tools)))
    rules = [f"call: BREAK? {token[Marker.CALL]} ({names}) BREAK? {token[Marker.END_CALL]}"]
    for number, tool in enumerate(tools):
        rules += _tool_rules(f"tool_{number}", tool["function"], token)
    rules.append(f"any_argument: {_argument('KEY', 'TEXT?', token)}")
    return "\n".join(rules) + "\n" + TERMINALS


def _tool_rules(rule: str, function: Mapping[str, Any], token: dict[Marker, str]) -> list[str]:
    """The tool's name and its arguments, in the schema's order; any arguments where it names none."""
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    arguments, rules = [], []
    for number, (name, value) in enumerate(properties.items()):
        arguments.append(f"{rule}_{number}" + ("" if name in required else "?"))
        rules.append(f"{rule}_{number}: {_argument(_quoted(name), _value(value, schema), token)}")
    if not properties and (not schema or schema.get("additionalProperties")):
        arguments.append("any_argument*")
    return [f"{rule}: {' '.join([_quoted(function['name']), *arguments])}", *rules]


def _argument(key: str, value: str, token: dict[Marker, str]) -> str:
    name = f"{token[Marker.KEY]} {key} {token[Marker.END_KEY]}"
    return f"BREAK? {name} BREAK? {token[Marker.VALUE]} {value} {token[Marker.END_VALUE]}"


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """A string stands as it is, so it may be any text; other values are JSON."""
    types = allowed_types(schema, dict(root))
    listed = schema.get("enum") if types == {"string"} else None
    choices = [value for value in listed if isinstance(value, str)] if isinstance(listed, list) else []
    if choices:
        return "(" + " | ".join(map(_quoted, choices)) + ")"
    if types is None or "string" in types:
        return "TEXT?"
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return "%json " + json.dumps({**definitions, **schema})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker_tokens(tokenizer: Tokenizer) -> dict[Marker, str]:
    specials = tokenizer.special_tokens
    missing = next((marker.value for marker in CALLING if marker.value not in specials), None)
    if missing:
        raise UserError(f"this model's vocabulary has no {missing} token, so tool calls cannot be enforced")
    return {marker: f"<[{specials[marker.value]}]>" for marker in CALLING}
