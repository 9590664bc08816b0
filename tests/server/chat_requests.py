"""A tokenizer, tools and messages for tests of chat requests."""

import json
from pathlib import Path

from megaspan.server.chat import ChatPrompt
from megaspan.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "models" / "span-code")
END_THINK = TOKENIZER.special("</think>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Change a file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "count": {"$ref": "#/$defs/count"},
                    "mode": {"enum": ["all", "first"]},
                },
                "required": ["path"],
                "$defs": {"count": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "free"}},
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ASK = [{"role": "user", "content": "hello"}]


def decoded(prompt: ChatPrompt) -> str:
    return TOKENIZER.decode(prompt.token_ids)


def ids(text: str) -> list[int]:
    return TOKENIZER._encode_rendered(text, "\ue000")


def assistant(reasoning: str = "", content: str | None = None, *calls: tuple[str, str, dict]) -> dict:
    message: dict = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for call_id, name, arguments in calls
        ]
    return message
