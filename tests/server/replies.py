"""Replies as token ids, and what the parser makes of them."""

import json
from pathlib import Path

import tokenizers
from hypothesis import strategies as st

from megaspan.server.parser import Event, Message, ReplyParser, complete_message
from megaspan.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "models" / "span-code")
SPECIALS = list(TOKENIZER.special_tokens)


def plain_tokenizer() -> Tokenizer:
    """The same vocabulary without special tokens: markers come as text."""
    content = json.loads(TOKENIZER.backend.to_str())
    content["added_tokens"] = []
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


PLAIN = plain_tokenizer()


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


def parse(token_ids: list[int], sizes: list[int] | int = 1, tokenizer=TOKENIZER, **options) -> list[Event]:
    """Events of a reply pushed in bursts of the given sizes, used in turn."""
    parser = ReplyParser(tokenizer, **{"tools": TOOLS, **options})
    sizes = [sizes] if isinstance(sizes, int) else sizes
    events, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        events += parser.push(token_ids[start : start + size])
        start, turn = start + size, turn + 1
    return events + parser.finish()


def read(token_ids: list[int], sizes: list[int] | int = 1, **options) -> Message:
    return complete_message(parse(token_ids, sizes, **options))


def shape(message: Message) -> tuple:
    """The message without the calls' ids, which are random."""
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


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
