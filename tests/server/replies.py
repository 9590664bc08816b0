"""Replies as token ids, and what the parser makes of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st

from megaspan.engine.request import Output
from megaspan.server.parser import (
    Event,
    Message,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    complete_message,
)
from megaspan.server.reply import ChatReply
from megaspan.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "models" / "span-code")
SPECIALS = list(TOKENIZER.special_tokens)
END = Output("", finish_reason="stop")


def without_markers(*kept: str) -> Tokenizer:
    """The same vocabulary without special tokens other than those: markers come as text."""
    content = json.loads(TOKENIZER.backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in kept]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


PLAIN = without_markers()


def tool(name: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("edit", path={"type": "string"}, text={"type": "string"}, count={"type": "integer"}),
    tool("get_time"),
    tool("get_time_zone", where={"anyOf": [{"type": "string"}, {"type": "null"}]}),
]


def ids(text: str) -> list[int]:
    """Token ids of a reply in which every marker is the special token."""
    return TOKENIZER._encode_rendered(text, "\ue000")


def spelled(text: str) -> list[int]:
    """Token ids of text alone: markers in it are spelled in characters."""
    return TOKENIZER.encode(text)


def reply_of(tokenizer: Tokenizer = TOKENIZER, **options) -> ChatReply:
    return ChatReply(tokenizer, ReplyParser(tokenizer, **{"tools": TOOLS, **options}))


def parse(token_ids: list[int], sizes: list[int] | int = 1, tokenizer=TOKENIZER, **options) -> list[Event]:
    """Events of a reply that comes in bursts of the given sizes, used in turn."""
    reply = reply_of(tokenizer, **options)
    sizes = [sizes] if isinstance(sizes, int) else sizes
    events, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        events += reply.push(Output("", tuple(token_ids[start : start + size])))
        start, turn = start + size, turn + 1
    return events + reply.push(END)


def merged(events: Iterable[Event]) -> list[Event]:
    """The events as one burst would make them, with the calls' random ids left out."""
    whole: list[Any] = []
    for event in events:
        last = whole[-1] if whole else None
        match event, last:
            case (ReasoningDelta(), ReasoningDelta()) | (TextDelta(), TextDelta()):
                whole[-1] = type(event)(last.text + event.text)
            case ToolArgumentsDelta(index, more), ToolArgumentsDelta(same, fragment) if same == index:
                whole[-1] = ToolArgumentsDelta(index, fragment + more)
            case ToolCallStart(index, _, name), _:
                whole.append(ToolCallStart(index, "", name))
            case _:
                whole.append(event)
    return whole


def read(token_ids: list[int], sizes: list[int] | int = 1, **options) -> Message:
    return complete_message(parse(token_ids, sizes, **options))


def call(name: str, *arguments: tuple[str, str], line: str = "\n") -> str:
    pairs = "".join(f"{line}<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>" for k, v in arguments)
    return f"<tool_call>{name}{pairs}{line}</tool_call>"


REPLY = (
    "I must edit.\nThen look: é 漢字 🙂\n</think>\nI edit if a < b: now 🙂.\n\n"
    + call("edit", ("path", "src/ä.py"), ("text", 'a = "x"\n\tif a < b: \\ 🙂'), ("count", "3"))
    + "\n"
    + call("get_time")
    + "<|observation|>"
)
MEANT = (
    "I must edit.\nThen look: é 漢字 🙂",
    "I edit if a < b: now 🙂.",
    [
        ("edit", {"path": "src/ä.py", "text": 'a = "x"\n\tif a < b: \\ 🙂', "count": 3}),
        ("get_time", {}),
    ],
)


def meaning(message: Message) -> tuple:
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.reasoning, message.content, calls


bursts = st.lists(st.integers(1, 7), min_size=1, max_size=4)
