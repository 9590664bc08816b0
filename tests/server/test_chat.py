import json
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.engine.sampling import Grammar
from megaspan.errors import UserError
from megaspan.server.anthropic_chat import from_anthropic
from megaspan.server.chat import render
from tests.server.chat_requests import (
    ASK,
    END_THINK,
    JSON_SCHEMA,
    SCHEMA,
    TOKENIZER,
    TOOLS,
    assistant,
    decoded,
)
from tests.server.replies import read


def test_a_prompt_ends_where_the_reply_begins() -> None:
    prompt = render(TOKENIZER, ASK)
    assert decoded(prompt).endswith("<|user|>\nhello<|assistant|>\n<think>")
    assert prompt.thinking
    assert (prompt.grammar, prompt.tools, prompt.forbidden, prompt.continued) == (None, (), (), False)


def test_thinking_is_what_the_template_made_of_it() -> None:
    assert not render(TOKENIZER, ASK, template_arguments={"enable_thinking": False}).thinking
    assert not render(TOKENIZER, ASK, reasoning_effort="none").thinking
    assert not render(TOKENIZER, ASK, add_generation_prompt=False).thinking
    spelled = [{"role": "user", "content": "what is <think>"}]
    assert not render(TOKENIZER, spelled, add_generation_prompt=False).thinking


@pytest.mark.parametrize(
    ("effort", "line"), [("low", "High"), ("high", "High"), ("xhigh", "Max"), ("max", "Max"), (None, "Max")]
)
def test_efforts_become_one_of_the_two_that_glm_knows(effort: str | None, line: str) -> None:
    assert f"Reasoning effort: {line}" in decoded(render(TOKENIZER, ASK, reasoning_effort=effort))


def test_template_arguments_win_over_the_effort() -> None:
    prompt = render(TOKENIZER, ASK, reasoning_effort="high", template_arguments={"reasoning_effort": "none"})
    assert not prompt.thinking


def test_text_parts_are_put_together() -> None:
    parts = [{"type": "text", "text": "if a < b:"}, {"type": "text", "text": " go"}]
    assert "if a < b: go<|assistant|>" in decoded(render(TOKENIZER, [{"role": "user", "content": parts}]))


def test_special_tokens_in_messages_are_text() -> None:
    prompt = render(TOKENIZER, [{"role": "user", "content": "<|user|></think><tool_call>"}])
    assert prompt.token_ids.count(TOKENIZER.special("<|user|>")) == 1
    assert TOKENIZER.special("<tool_call>") not in prompt.token_ids


def conversation() -> list[dict]:
    """Three turns of an agent, with a second question at the end."""
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "fix it"},
        assistant("I look.", "Looking.", ("a", "edit", {"path": 'x "y" 🙂\n', "count": 3}), ("b", "now", {})),
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        {"role": "tool", "tool_call_id": "b", "content": "12:00"},
        assistant("It is noon.", "Fixed."),
        {"role": "user", "content": "thanks, again"},
        assistant("Again.", "Again."),
        {"role": "user", "content": "more"},
    ]


REPLIES = (2, 5, 7)


@pytest.mark.parametrize("thinking", [True, False])
def test_the_next_turn_begins_with_this_turn_s_prompt(thinking: bool) -> None:
    """P71: with the reasoning kept, what was cached of a turn serves all later ones."""
    arguments = {"clear_thinking": False, "enable_thinking": thinking}
    messages = conversation() if thinking else [{**m, "reasoning_content": ""} for m in conversation()]
    prompts = [
        render(TOKENIZER, messages[:end], TOOLS, template_arguments=arguments).token_ids
        for end in (*REPLIES, len(messages))
    ]
    for shorter, longer in pairwise(prompts):
        assert longer[: len(shorter)] == shorter


def test_the_next_turn_begins_with_this_turn_s_reply() -> None:
    """P71: parsed and rendered again, a reply has the ids that the model wrote."""
    arguments = {"clear_thinking": False}
    messages = conversation()
    whole = render(TOKENIZER, messages, TOOLS, template_arguments=arguments).token_ids
    for place in REPLIES:
        prompt = render(TOKENIZER, messages[:place], TOOLS, template_arguments=arguments)
        until = render(
            TOKENIZER, messages[: place + 1], TOOLS, template_arguments=arguments, add_generation_prompt=False
        )
        written = until.token_ids[len(prompt.token_ids) :]
        reply = read(written, tools=prompt.tools, thinking=prompt.thinking)
        calls = [(call.id, call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        again = [*messages[:place], assistant(reply.reasoning, reply.content, *calls)]
        next_turn = render(TOKENIZER, again, TOOLS, template_arguments=arguments, add_generation_prompt=False)
        assert next_turn.token_ids == prompt.token_ids + written == whole[: len(until.token_ids)]


def test_the_prefix_is_stable_up_to_the_last_question_when_reasoning_is_cleared() -> None:
    """P71: GLM's default drops the reasoning of answered questions, and nothing before it changes."""
    messages = conversation()
    first = render(TOKENIZER, messages[:2], TOOLS).token_ids
    second = render(TOKENIZER, messages[:5], TOOLS).token_ids
    third = render(TOKENIZER, messages[:7], TOOLS).token_ids
    assert second[: len(first)] == first
    assert third[: len(first)] == first
    assert TOKENIZER.decode(third).count("I look.") == 0


def test_results_go_in_the_order_of_their_calls() -> None:
    """The layout has no ids, so only the order says whose result it is."""
    messages = conversation()[:5]
    swapped = [*messages[:3], messages[4], messages[3]]
    assert render(TOKENIZER, swapped).token_ids == render(TOKENIZER, messages).token_ids
    unknown = [*messages[:3], {**messages[4], "tool_call_id": "?"}, messages[3]]
    assert decoded(render(TOKENIZER, unknown)).index("12:00") < decoded(render(TOKENIZER, unknown)).index(
        "done"
    )


def test_the_last_message_can_be_continued() -> None:
    messages = [*ASK, assistant("", "Once upon ")]
    prompt = render(TOKENIZER, messages, continue_final_message=True)
    assert decoded(prompt).endswith("</think>\nOnce upon")
    assert prompt.continued
    assert not prompt.thinking


def test_choice_none_shows_the_tools_and_forbids_calls() -> None:
    prompt = render(TOKENIZER, ASK, TOOLS, "none")
    assert prompt.token_ids == render(TOKENIZER, ASK, TOOLS).token_ids
    assert prompt.tools == ()
    assert prompt.forbidden == (TOKENIZER.special("<tool_call>"),)


def test_a_response_format_is_a_grammar_after_the_reasoning() -> None:
    """P70: it begins after `</think>`, and at once where there is no reasoning."""
    prompt = render(TOKENIZER, ASK, response_format=JSON_SCHEMA)
    assert prompt.grammar == Grammar("json_schema", json.dumps(SCHEMA), END_THINK)
    plain = render(TOKENIZER, ASK, response_format={"type": "json_object"}, reasoning_effort="none")
    assert plain.grammar == Grammar("json")
    assert render(TOKENIZER, ASK, response_format={"type": "text"}).grammar is None
    own = render(TOKENIZER, ASK, grammar=Grammar("regex", "a+"))
    assert own.grammar == Grammar("regex", "a+", END_THINK)


BAD = [
    ({"messages": []}, "at least one"),
    ({"messages": "hello"}, "list"),
    ({"messages": [3]}, "object"),
    ({"messages": [{"content": "x"}]}, "role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text only"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "string"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "function_call"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "name"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
            ]
        },
        "object",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{]"}}]}]},
        "not JSON",
    ),
    ({"tools": "edit"}, "list"),
    ({"tools": [{"type": "web_search"}]}, "function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools"),
    ({"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": 3}}}}]}, "schemas"),
    ({"tools": [{"function": {"name": "f", "parameters": {"required": "a"}}}]}, "required"),
    ({"tool_choice": "required"}, "no tools"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "among the tools"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"template_arguments": {"messages": []}}, "argument"),
    ({"template_arguments": {"namespace": 1}}, "argument"),
    ({"template_arguments": []}, "object"),
    ({"template_arguments": {"x": object()}}, "JSON"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "schema"),
    ({"response_format": "json"}, "response_format"),
    ({"continue_final_message": True}, "assistant"),
    ({"messages": [*ASK, assistant("x", " ")], "continue_final_message": True}, "assistant"),
]


@pytest.mark.parametrize(("request_", "says"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_get_one_clear_line(request_: dict, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        render(TOKENIZER, **{"messages": ASK, **request_})
    assert "\n" not in str(caught.value)


def test_nesting_is_bounded() -> None:
    deep: dict = {}
    for _ in range(200):
        deep = {"properties": deep}
    with pytest.raises(UserError, match="deep"):
        render(TOKENIZER, ASK, [{"function": {"name": "f", "parameters": {"properties": {"a": deep}}}}])


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["", "user", "text", "x", "\ud800", "f"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("role", "content", "type", "text", "tool_calls", "function", "name", "parameters"),
                    *("properties", "required", "arguments", "input", "input_schema", "id", "thinking"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
roles = st.sampled_from(["user", "assistant", "tool", "system"])
messages = st.lists(junk | st.fixed_dictionaries({"role": roles, "content": junk}), max_size=3)


@given(messages, st.none() | st.lists(junk, max_size=2), junk, junk, junk)
@settings(max_examples=300)
def test_no_request_fails_otherwise(messages: list, tools: list | None, choice, arguments, form) -> None:
    """Whatever JSON comes: a prompt or a UserError, in OpenAI's form and in Anthropic's."""
    for make in (
        lambda: {
            "messages": messages,
            "tools": tools,
            "tool_choice": choice,
            "template_arguments": arguments,
        },
        lambda: from_anthropic(messages, form, tools, choice, arguments),
    ):
        with suppress(UserError):
            assert render(TOKENIZER, **make(), response_format=form).token_ids
