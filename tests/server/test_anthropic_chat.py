import pytest

from megaspan.errors import UserError
from megaspan.server.anthropic_chat import from_anthropic
from megaspan.server.chat import render
from tests.server.chat_requests import (
    ASK,
    TOKENIZER,
    TOOLS,
    assistant,
    decoded,
)


def test_a_client_s_header_does_not_destroy_the_prefix() -> None:
    """P71: a coding agent's client begins its instructions with a hash that changes at each request."""
    turns = [
        from_anthropic(
            [{"role": "user", "content": "hi"}],
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cch={n}"},
                {"type": "text", "text": "Be."},
            ],
        )
        for n in range(2)
    ]
    assert turns[0] == turns[1]
    assert turns[0]["messages"][0] == {"role": "system", "content": "Be."}


def test_anthropic_messages_render_as_openai_s_do() -> None:
    tools = [
        {
            "name": t["function"]["name"],
            "description": "d",
            "input_schema": t["function"].get("parameters", {}),
        }
        for t in TOOLS
    ]
    converted = from_anthropic(
        [
            {"role": "user", "content": [{"type": "text", "text": "fix it", "cache_control": {}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "a", "name": "edit", "input": {"path": "x"}},
                    {"type": "tool_use", "id": "b", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "b", "content": "12:00"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "text", "text": "done"}],
                    },
                    {"type": "text", "text": "go"},
                    {"type": "text", "text": "on"},
                ],
            },
        ],
        system="Be brief.",
        tools=tools,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
    )
    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "fix it"},
        assistant("I look.", "Looking.", ("a", "edit", {"path": "x"}), ("b", "now", {})),
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        {"role": "tool", "tool_call_id": "b", "content": "12:00"},
        {"role": "user", "content": "go\non"},
    ]
    described = [
        {"function": {**t["function"], "description": "d", "parameters": t["function"].get("parameters", {})}}
        for t in TOOLS
    ]
    prompt = render(TOKENIZER, **converted)
    expected = render(TOKENIZER, same, described, template_arguments={"enable_thinking": False})
    assert decoded(prompt).partition("</tools>")[2] == decoded(expected).partition("</tools>")[2]
    assert len(prompt.tools) == len(expected.tools)
    one_call = render(TOKENIZER, same, prompt.tools, "required", parallel_tool_calls=False)
    assert prompt.grammar is not None
    assert one_call.grammar is not None
    assert prompt.grammar.text == one_call.grammar.text


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"messages": "x"}, "list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": []}]}, "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "input"),
        ({"system": [{"type": "image"}]}, "text only"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tool of the client"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "name"),
        ({"thinking": {"type": "much"}}, "thinking"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_anthropic_requests_get_one_clear_line(request_: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_anthropic(**{"messages": ASK, **request_})
