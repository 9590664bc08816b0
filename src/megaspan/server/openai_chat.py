"""`/v1/chat/completions`: a conversation in; reasoning, text and tool calls out, in OpenAI's shape."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from megaspan.engine.request import Output
from megaspan.engine.sampling import MOST_LOGPROBS
from megaspan.server.chat import ChatPrompt, render
from megaspan.server.errors import ApiError, openai_error
from megaspan.server.event_stream import DONE, EventStream, data_event
from megaspan.server.json_body import JsonRoute
from megaspan.server.parser import (
    Event,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    complete_message,
)
from megaspan.server.reply import ChatReply, TokenRecord, openai_usage
from megaspan.server.request_fields import (
    MaxTokens,
    Objects,
    SamplingFields,
    StreamOptions,
    Texts,
    derived_seed,
)
from megaspan.server.service import Job, Service
from megaspan.server.submission import Submission
from megaspan.token_budget import TokenBudget

router = APIRouter(route_class=JsonRoute)


class ChatRequest(SamplingFields):
    """OpenAI's fields; vLLM's for sampling, structured output, templates and token ids."""

    ignored = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "prediction",
            "priority",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "verbosity",
        }
    )

    model: str | None = None
    messages: Objects
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None  # GLM's own way to turn thinking off
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: Texts | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    n: int = 1
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


@dataclass
class Choice:
    """One reply on its way."""

    reply: ChatReply
    record: TokenRecord = field(default_factory=TokenRecord)
    events: list[Event] = field(default_factory=list)

    def push(self, output: Output) -> list[Event]:
        self.record.add(output)
        return self.reply.push(output)

    @property
    def last(self) -> Output | None:
        return self.reply.last

    @property
    def finish_reason(self) -> str | None:
        if self.reply.ended_in_calls:
            return "tool_calls"
        return self.last.finish_reason if self.last else None


@router.post("/v1/chat/completions", response_class=Response)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    check(body, service.options.max_choices)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    copies = range(body.n)

    def prepare(budget: TokenBudget) -> tuple[list[Job], ChatPrompt]:
        prompt = rendered(service, body, budget)
        params = body.sampling(wanted, body.top_logprobs, prompt.grammar, prompt.forbidden)
        seeds = [derived_seed(params.seed, copy) for copy in copies]
        return [(prompt.token_ids, replace(params, seed=seed)) for seed in seeds], prompt

    submission, prompt = await service.submit(request.state, prepare, "messages")
    parsers = [
        ReplyParser(
            service.tokenizer, prompt.tools, prompt.thinking, body.separate_reasoning, prompt.continued
        )
        for _ in copies
    ]
    choices = [Choice(ChatReply(service.tokenizer, parser)) for parser in parsers]
    answer = ChatAnswer(service, body, submission, prompt, choices)
    if body.stream:
        return EventStream(submission, answer.chunks(), lambda error: data_event(openai_error(error)))
    return JSONResponse(await answer.whole())


def check(body: ChatRequest, max_choices: int) -> None:
    """Raises ApiError for what fields ask together, or beyond this server's bounds."""
    if not 1 <= body.n <= max_choices:
        raise ApiError(400, f"n is {body.n}; it must be from 1 to {max_choices}", param="n")
    if body.modalities not in (None, ["text"]):
        raise ApiError(400, 'modalities must be ["text"]; this model has no other', param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def rendered(service: Service, body: ChatRequest, budget: TokenBudget) -> ChatPrompt:
    """Raises ApiError or UserError for what cannot be rendered, or does not fit."""
    structure, answer = body.structure(), body.response_format
    if structure and answer and answer.get("type") != "text":
        raise ApiError(400, "response_format cannot go with another structure", param="response_format")
    thinking = thinking_argument(body.thinking)
    return render(
        service.tokenizer,
        body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        reasoning_effort=body.reasoning_effort,
        template_arguments={**thinking, **(body.chat_template_kwargs or {})},
        response_format=body.response_format,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=structure,
        budget=budget,
    )


def thinking_argument(thinking: dict[str, Any] | None) -> dict[str, Any]:
    """`{"type": "enabled" or "disabled"}` as an argument of the chat template."""
    if thinking is None:
        return {}
    if thinking.get("type") not in ("enabled", "disabled"):
        raise ApiError(400, "thinking's type must be enabled or disabled", param="thinking")
    return {"enable_thinking": thinking["type"] == "enabled"}


def delta(event: Event) -> dict[str, Any] | None:
    """A parser's event as OpenAI's `delta`; None where the protocol has nothing to say."""
    match event:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case TextDelta(text):
            return {"content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArgumentsDelta(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
    return None


@dataclass
class ChatAnswer:
    """The response, in chunks or whole."""

    service: Service
    body: ChatRequest
    submission: Submission
    prompt: ChatPrompt
    choices: list[Choice]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for index in range(len(self.choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, output in self.submission.outputs():
            for event in self.choices[index].push(output):
                content = delta(event)
                if content is not None:
                    yield self._chunk(index, content)
            if output.finish_reason is not None:
                yield self._chunk(index, {})
        if self._reports_usage:
            yield data_event(
                {**self._envelope("chat.completion.chunk"), "choices": [], "usage": self._usage()}
            )
        yield DONE

    async def whole(self) -> dict[str, Any]:
        with self.submission:
            async for index, output in self.submission.outputs():
                choice = self.choices[index]
                choice.events += choice.push(output)
        choices = [
            {"index": index, "message": self._message(choice), **self._end(choice)}
            for index, choice in enumerate(self.choices)
        ]
        content = {**self._envelope("chat.completion"), "choices": choices, "usage": self._usage()}
        return (
            {**content, "prompt_token_ids": self.prompt.token_ids} if self.body.return_token_ids else content
        )

    def _chunk(self, index: int, content: dict[str, Any]) -> bytes:
        choice = self.choices[index]
        end = self._end(choice) if not content else {"finish_reason": None, **self._tokens(choice)}
        chunk = {
            **self._envelope("chat.completion.chunk"),
            "choices": [{"index": index, "delta": content, **end}],
        }
        if self._reports_usage:
            chunk["usage"] = None
        if self.body.return_token_ids and "role" in content:
            chunk["prompt_token_ids"] = self.prompt.token_ids
        return data_event(chunk)

    @property
    def _reports_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _end(self, choice: Choice) -> dict[str, Any]:
        end = {"finish_reason": choice.finish_reason, **self._tokens(choice)}
        if choice.last is not None and isinstance(choice.last.stop_reason, str):
            end["stop_reason"] = choice.last.stop_reason
        return end

    def _tokens(self, choice: Choice) -> dict[str, Any]:
        """What was asked for about the tokens since the last chunk, shown or not."""
        asked: dict[str, Any] = {"logprobs": None}
        if not self.body.logprobs and not self.body.return_token_ids:
            return asked
        record = choice.record.take()
        if self.body.logprobs and record.token_ids:
            asked["logprobs"] = record.chat_logprobs(self.service.tokenizer, self.body.top_logprobs or 0)
        if self.body.return_token_ids:
            asked["token_ids"] = record.token_ids
        return asked

    def _message(self, choice: Choice) -> dict[str, Any]:
        message = complete_message(choice.events)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        content = message.content if message.content or not calls else None
        whole = {"role": "assistant", "content": content, "refusal": None}
        if message.reasoning:
            whole["reasoning_content"] = message.reasoning
        return {**whole, "tool_calls": calls} if calls else whole

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.submission.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.service.options.model_name,
        }

    def _usage(self) -> dict[str, Any]:
        ends = [choice.last for choice in self.choices if choice.last is not None]
        generated = sum(end.completion_tokens for end in ends)
        reasoning = sum(choice.reply.parser.reasoning_tokens for choice in self.choices)
        return openai_usage(len(self.prompt.token_ids), generated, ends[0].cached_tokens, reasoning)
