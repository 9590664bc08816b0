"""Messages and tools of a chat request, checked: what reaches the template has the form that it expects."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from megaspan.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
MOST_TOOLS = 1024
DEEPEST = 64  # levels of nested lists and objects in a tool or an argument


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text as their content and objects as their calls' arguments.

    Results of calls made at once are put in the calls' order: GLM's layout has no ids to tell them apart.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError("messages must be a list of at least one message")
    return _in_call_order([_check_message(message, place) for place, message in enumerate(messages)])


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools as `{"type": "function", "function": {"name", ...}}`, each name once."""
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MOST_TOOLS:
        raise UserError(f"tools must be a list of at most {MOST_TOOLS} tools")
    checked = [_check_tool(tool, place) for place, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two tools are named {twice!r}; give each its own name")
    return checked


def check_text(value: Any) -> None:
    """Raise UserError for what has no JSON, is nested too deeply, or holds half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError("the request's text has an unpaired surrogate, which is no character") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the request cannot be written as JSON: {error}") from error
    if _depth_exceeds(value, DEEPEST):
        raise UserError(f"the request nests lists and objects more than {DEEPEST} levels deep")


def joined_text(content: Any, place: str) -> str:
    """The text of a message's content: a string, or a list of text parts, put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UserError(f"{place}.content must be a string or a list of text parts")
    return "".join(_part_text(part, f"{place}.content[{number}]") for number, part in enumerate(content))


def _part_text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UserError(f"{place} must be an object with a type")
    if part.get("type") not in ("text", "refusal"):
        raise UserError(f"{place} has type {part.get('type')!r}: this model reads text only")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise UserError(f"{place}.{part['type']} must be a string")
    return text


def _check_message(message: Any, number: int) -> dict[str, Any]:
    place = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise UserError(f"{place} must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"{place}.role is {role!r}; give one of {', '.join(ROLES)}")
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise UserError(f"{place}.{name} is not supported; use tool_calls and text")
    content = message.get("content")
    if role == "assistant":
        return _check_assistant(message, place)
    if content is None:
        raise UserError(f"{place}.content is missing")
    checked: dict[str, Any] = {"role": role, "content": joined_text(content, place)}
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        checked["tool_call_id"] = message["tool_call_id"]
    return checked


def _check_assistant(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    content = message.get("content")
    checked: dict[str, Any] = {
        "role": "assistant",
        "content": "" if content is None else joined_text(content, place),
    }
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None and not isinstance(reasoning, str):
        raise UserError(f"{place}.reasoning_content must be a string")
    if reasoning:
        checked["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, Sequence) or isinstance(calls, str)):
        raise UserError(f"{place}.tool_calls must be a list")
    if calls:
        checked["tool_calls"] = [
            _check_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return checked


def _check_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{place} must have a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            # a call that was cut off comes back as it was told: what its beginning holds counts
            arguments = from_json(arguments, allow_partial="trailing-strings") if arguments.strip() else {}
        except ValueError as error:
            raise UserError(f"{place}.function.arguments is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise UserError(f"{place}.function.arguments must be a JSON object")
    return {"id": call.get("id"), "function": {"name": function["name"], "arguments": dict(arguments)}}


def _check_tool(tool: Any, number: int) -> dict[str, Any]:
    place = f"tools[{number}]"
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise UserError(f"{place} must be an object of type function")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise UserError(f"{place}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise UserError(f"{place} needs a name of 1 to 128 letters, digits and _ . : / -")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UserError(f"{place}.function.parameters must be a JSON schema, an object")
    properties = (parameters or {}).get("properties", {})
    required = (parameters or {}).get("required", [])
    if not isinstance(properties, Mapping) or not all(
        isinstance(schema, Mapping | bool) for schema in properties.values()
    ):
        raise UserError(f"{place}.function.parameters.properties must be an object of schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise UserError(f"{place}.function.parameters.required must be a list of names")
    return {"type": "function", "function": dict(function)}


def _in_call_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered: list[dict[str, Any]] = []
    ranks: dict[str, int] = {}  # of the last calls
    for are_results, messages_in_a_row in groupby(messages, lambda message: message["role"] == "tool"):
        group = list(messages_in_a_row)
        if not are_results:
            calls = group[-1].get("tool_calls", [])
            ranks = {call["id"]: rank for rank, call in enumerate(calls) if isinstance(call["id"], str)}
        elif all(result.get("tool_call_id") in ranks for result in group):
            group.sort(key=lambda result: ranks[result["tool_call_id"]])
        ordered += group
    return ordered


def _depth_exceeds(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return bool(inner) and (levels == 0 or any(_depth_exceeds(item, levels - 1) for item in inner))
