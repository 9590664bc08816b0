"""The anthropic Python client against the true engine on a small random model."""

from typing import Any

import anthropic
import pytest

from tests.server.asking import MODEL, QUESTION
from tests.server.small_model import LEVELS, LONG_TEXT, check_levels

pytestmark = pytest.mark.usefixtures("nothing_is_left")
ANTHROPIC_TOOLS: Any = [{"name": "set_level", "description": "Sets it.", "input_schema": LEVELS}]


@pytest.fixture(scope="module")
def claude(real_base):
    with anthropic.Anthropic(base_url=real_base, api_key="none", max_retries=0) as client:
        yield client


def test_anthropic_streamed_and_whole_are_the_same_text(claude):
    asked: Any = {"model": MODEL, "max_tokens": 16, "messages": QUESTION, "system": "Be."}
    asked["extra_body"] = {"temperature": 0}  # newer clients have no argument for it
    whole = claude.messages.create(**asked)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 16)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        usage = stream.get_final_message().usage
    read = usage.input_tokens + usage.cache_read_input_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be.")
    assert counted.input_tokens == read == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_anthropic_thinking_is_a_block_of_its_own(claude):
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = claude.messages.create(model=MODEL, max_tokens=8, messages=QUESTION, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_level"}])
def test_anthropic_tool_choice_makes_a_call_and_its_result_is_taken(claude, choice):
    asked: Any = {"model": MODEL, "max_tokens": 300, "tools": ANTHROPIC_TOOLS}
    alone = {**choice, "disable_parallel_tool_use": True}
    with claude.messages.stream(**asked, messages=QUESTION, tool_choice=alone) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    check_levels(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    turns: Any = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(**{**asked, "max_tokens": 4}, messages=turns).usage.output_tokens == 4


def test_anthropic_usage_counts_what_the_cache_had(claude):
    """P71."""
    asked: Any = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": LONG_TEXT * 2}]}
    first, second = (claude.messages.create(**asked).usage for _ in range(2))
    assert second.cache_read_input_tokens > second.input_tokens
    assert (
        first.input_tokens + first.cache_read_input_tokens
        == second.input_tokens + second.cache_read_input_tokens
    )
