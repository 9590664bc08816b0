"""Anthropic's messages, tools and choices in OpenAI's form, so that one renderer serves both."""

from collections.abc import Mapping, Sequence
from typing import Any

from megaspan.errors import UserError

# A coding agent's client puts a line with a new hash in front of its instructions at each request. It is a
# header in the wrong place: left in, no prompt would begin as the one before.
CLIENT_HEADER = "x-anthropic-billing-header:"

Blocks = str | Sequence[Mapping[str, Any]]


def from_anthropic(
    messages: Sequence[Mapping[str, Any]],
    system: Blocks | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Mapping[str, Any] | None = None,
    thinking: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for `chat.render`. Raises UserError for what has no place in a text conversation."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UserError("messages must be a list of messages")
    converted = _system_messages(system)
    for number, message in enumerate(messages):
        converted += _message(message, f"messages[{number}]")
    choice, parallel = _tool_choice(tool_choice)
    return {
        "messages": converted,
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())] or None,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "template_arguments": _thinking(thinking),
    }


def _system_messages(system: Blocks | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    texts = [text for text in _texts(system, "system") if not text.startswith(CLIENT_HEADER)]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _message(message: Any, place: str) -> list[dict[str, Any]]:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    if role == "system":
        return _system_messages(content)
    if role not in ("user", "assistant"):
        raise UserError(f"{place}.role must be user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, Sequence):
        raise UserError(f"{place}.content must be a string or a list of blocks")
    for number, block in enumerate(blocks):
        if not isinstance(block, Mapping):
            raise UserError(f"{place}.content[{number}] must be an object with a type")
    return _assistant(blocks, place) if role == "assistant" else _user(blocks, place)


def _user(blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """A user's turn: results of tools become messages of their own, where they stand among the texts."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where = f"{place}.content[{number}]"
        if block.get("type") == "tool_result":
            result = "\n".join(_texts(block.get("content") or "", f"{where}.content"))
            messages.append(
                {"role": "tool", "content": result, "tool_call_id": _string(block, "tool_use_id", where)}
            )
        else:
            text = _text(block, where)
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += "\n" + text
            else:
                messages.append({"role": "user", "content": text})
    if not messages:
        raise UserError(f"{place}.content is empty")
    return messages


def _assistant(blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    texts, reasoning, calls = [], [], []
    for number, block in enumerate(blocks):
        where = f"{place}.content[{number}]"
        match block.get("type"):
            case "thinking":
                reasoning.append(_string(block, "thinking", where))
            case "redacted_thinking":
                pass  # another model's, and unreadable
            case "tool_use":
                if not isinstance(block.get("input"), Mapping):
                    raise UserError(f"{where}.input must be an object")
                function = {"name": _string(block, "name", where), "arguments": dict(block["input"])}
                calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
            case _:
                texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        raise UserError(f"{place} must be a tool of the client's own, with a name and an input_schema")
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    if choice is None:
        return None, True
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    names = {"auto": "auto", "none": "none", "any": "required"}
    if isinstance(kind, str) and kind in names:
        chosen: str | dict[str, Any] = names[kind]
    elif kind == "tool":
        chosen = {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    else:
        raise UserError("tool_choice's type must be auto, any, tool or none")
    return chosen, not choice.get("disable_parallel_tool_use", False)


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of the chat template. Without a word from the client, the model's own default holds."""
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise UserError("thinking's type must be enabled, disabled or adaptive")
    return {"enable_thinking": kind != "disabled"}


def _texts(content: Any, place: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise UserError(f"{place} must be a string or a list of text blocks")
    return [_text(block, f"{place}[{number}]") for number, block in enumerate(content)]


def _text(block: Any, place: str) -> str:
    if not isinstance(block, Mapping) or block.get("type") != "text":
        kind = block.get("type") if isinstance(block, Mapping) else None
        raise UserError(f"{place} has type {kind!r}: this model reads text only")
    return _string(block, "text", place)


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise UserError(f"{place}.{name} must be a string")
    return value
