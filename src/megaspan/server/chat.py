"""A chat request as the token ids of its prompt, and what the reply must keep to.

Messages, tools and choices come in OpenAI's form; `anthropic_chat.from_anthropic` brings Anthropic's into it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaspan.engine.sampling import Grammar
from megaspan.errors import UserError
from megaspan.server.chat_messages import check_messages, check_text, check_tools
from megaspan.server.markers import Marker
from megaspan.server.reply_grammar import answer_grammar, answer_or_calls_grammar, calls_grammar
from megaspan.token_budget import TokenBudget
from megaspan.tokenizer import Tokenizer

# GLM knows two efforts beside "none". Its template would take any other word for the greatest.
EFFORTS = {
    "none": "none",
    "minimal": "high",
    "low": "high",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
RESERVED = {  # arguments of `apply_chat_template`, and what Jinja and its environment define
    *("self", "messages", "tools", "add_generation_prompt", "budget", "raise_exception", "strftime_now"),
    *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop", "caller", "varargs", "kwargs"),
}


@dataclass(frozen=True)
class ChatPrompt:
    """What the engine and the reply's parser need to know of a chat request.

    token_ids: the prompt.
    thinking: it ends inside `<think>`.
    grammar: what the reply must look like, from the end of its reasoning on.
    tools: those that the reply may call; none with the choice "none", although the prompt then shows them.
    forbidden: token ids that the reply must not contain (a logit bias of -100).
    continued: the reply goes on with the last message's text.

    `ReplyParser(tokenizer, prompt.tools, prompt.thinking, continued=prompt.continued)` reads the reply.
    """

    token_ids: list[int]
    thinking: bool = False
    grammar: Grammar | None = None
    tools: tuple[dict[str, Any], ...] = ()
    forbidden: tuple[int, ...] = ()
    continued: bool = False


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    add_generation_prompt: bool = True,
    parallel_tool_calls: bool = True,
    grammar: Grammar | None = None,
    budget: TokenBudget | None = None,
) -> ChatPrompt:
    """The prompt of a chat request. Raises UserError, in one line, for all that a client can get wrong.

    tool_choice: "auto" (the default), "none", "required" or {"type": "function", "function": {"name": ..}}.
    template_arguments: more arguments of the chat template, such as `enable_thinking` and `clear_thinking`.
    grammar: a client's own, in the place of response_format. budget: the prompt's, for `Tokenizer.encode`.

    With response_format and tools to choose from, the reply is either JSON or calls. A turn's prompt begins
    with the one before, as far as the template keeps what it rendered: GLM's leaves out the reasoning before
    the last user message unless `clear_thinking` is false.
    """
    checked_tools = check_tools(tools)
    checked = check_messages(messages)
    arguments = _template_arguments(template_arguments, reasoning_effort)
    check_text([checked, checked_tools, arguments])
    callable_tools, must_call = _choose(checked_tools, tool_choice)
    if continue_final_message:
        _check_continued(checked)
    generation = add_generation_prompt and not continue_final_message
    token_ids = _apply_template(tokenizer, checked, checked_tools, generation, budget, arguments)
    if continue_final_message:
        _check_open_end(tokenizer, token_ids, checked[-1]["content"])
    thinking = generation and _ends_in_think(tokenizer, token_ids)
    answer = grammar or _response_grammar(response_format)
    grammar = _reply_grammar(tokenizer, answer, callable_tools, must_call, parallel_tool_calls)
    if grammar and thinking:
        grammar = replace(grammar, begins_after=tokenizer.special_tokens.get(Marker.END_THINK.value))
    call = tokenizer.special_tokens.get(Marker.CALL.value)
    forbidden = (call,) if checked_tools and not callable_tools and call is not None else ()
    return ChatPrompt(
        token_ids, thinking, grammar, tuple(callable_tools), forbidden, continued=continue_final_message
    )


def _template_arguments(arguments: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    if arguments is not None and not isinstance(arguments, Mapping):
        raise UserError("the chat template's arguments must be an object")
    chosen = dict(arguments or {})
    reserved = sorted(RESERVED & chosen.keys())
    if reserved:
        raise UserError(f"chat_template_kwargs must not have an argument {reserved[0]!r}: the name is taken")
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise UserError(f"reasoning_effort is {effort!r}; give one of {', '.join(EFFORTS)}")
        chosen.setdefault("reasoning_effort", EFFORTS[effort])
    return chosen


def _apply_template(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    generation: bool,
    budget: TokenBudget | None,
    arguments: dict[str, Any],
) -> list[int]:
    try:
        return tokenizer.apply_chat_template(messages, tools or None, generation, budget, **arguments)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        # a template is a program: an argument of a type that it does not expect fails in it
        raise UserError(f"the chat template failed on the request: {error}") from error


def _choose(
    tools: list[dict[str, Any]], choice: str | Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], bool]:
    """The tools that the reply may call, and whether it must."""
    if choice is None or choice == "auto":
        return tools, False
    if choice == "none":
        return [], False
    if choice == "required":
        if not tools:
            raise UserError("tool_choice is 'required', but the request has no tools")
        return tools, True
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError("tool_choice must be auto, none, required or {type: function, function: {name}}")
    named = [tool for tool in tools if tool["function"]["name"] == function["name"]]
    if not named:
        raise UserError(f"tool_choice names {function['name']!r}, which is not among the tools")
    return named, True


def _response_grammar(response_format: Mapping[str, Any] | None) -> Grammar | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json")
    if kind != "json_schema":
        raise UserError("response_format's type must be text, json_object or json_schema")
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise UserError("response_format must hold the schema, an object, in json_schema.schema")
    return answer_grammar(schema)


def _reply_grammar(
    tokenizer: Tokenizer,
    answer: Grammar | None,
    tools: list[dict[str, Any]],
    must_call: bool,
    parallel: bool,
) -> Grammar | None:
    if must_call:
        return calls_grammar(tokenizer, tools, parallel)
    if answer and tools and answer.kind in ("json", "json_schema"):
        return answer_or_calls_grammar(tokenizer, answer, tools, parallel)
    return answer


def _check_continued(messages: list[dict[str, Any]]) -> None:
    last = messages[-1]
    if last["role"] != "assistant" or not (last.get("content") or "").strip() or last.get("tool_calls"):
        raise UserError("continue_final_message needs an assistant's text as the last message")


def _check_open_end(tokenizer: Tokenizer, token_ids: list[int], content: str) -> None:
    """Raise UserError where the template adds anything behind the last message's text."""
    ending = content.strip()
    tail = tokenizer.decode(token_ids[-len(ending.encode()) - 1 :])  # a token is at least a byte
    if not tail.rstrip().endswith(ending):
        raise UserError("this model's chat template closes the last message, so it cannot be continued")


def _ends_in_think(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    """Whether the generation prompt, which the template wrote, leaves the reasoning open."""
    opening = tokenizer.special_tokens.get(Marker.THINK.value)
    blank_free = next((i for i in reversed(token_ids) if tokenizer.token_bytes[i].strip()), None)
    if opening is not None:
        return blank_free == opening
    return tokenizer.decode(token_ids[-8:]).rstrip().endswith(Marker.THINK.value)
