"""`/v1/messages`: a conversation in, the reply's blocks out, in Anthropic's shape."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megaspan.engine.request import Output
from megaspan.engine.sampling import SamplingParams
from megaspan.server.anthropic_chat import from_anthropic
from megaspan.server.chat import ChatPrompt, render
from megaspan.server.errors import ABORTED, ApiError, anthropic_error
from megaspan.server.event_stream import EventStream, named_event
from megaspan.server.json_body import JsonRoute
from megaspan.server.parser import (
    Event,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from megaspan.server.reply import ChatReply
from megaspan.server.request_fields import FORBIDDING_BIAS, MaxTokens, Objects, RequestModel, Texts
from megaspan.server.service import Job, Service
from megaspan.server.submission import Submission
from megaspan.token_budget import TokenBudget

router = APIRouter(route_class=JsonRoute)

PING = named_event({"type": "ping"})


class OutputConfig(RequestModel):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(RequestModel):
    """What a prompt is made of."""

    ignored = frozenset(
        {
            "betas",
            "cache_control",
            "context_management",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
        }
    )

    model: str | None = None
    messages: Objects
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """Anthropic's fields."""

    max_tokens: MaxTokens
    stop_sequences: Texts | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@router.post("/v1/messages", response_class=Response)
async def messages(request: Request, body: MessagesRequest) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)

    def prepare(budget: TokenBudget) -> tuple[list[Job], ChatPrompt]:
        prompt = rendered(service, body, budget)
        return [(prompt.token_ids, sampling(service, body, prompt))], prompt

    submission, prompt = await service.submit(request.state, prepare, "messages")
    parser = ReplyParser(service.tokenizer, prompt.tools, prompt.thinking)
    answer = MessageAnswer(service, submission, prompt, ChatReply(service.tokenizer, parser))
    if body.stream:
        return EventStream(
            submission, answer.events(), lambda error: named_event(anthropic_error(error)), ping=PING
        )
    return JSONResponse(await answer.whole())


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountRequest) -> dict[str, int]:
    service: Service = request.app.state.service
    service.check_model(body.model)
    prompt = await service.encoded(lambda budget: rendered(service, body, budget), "messages")
    return {"input_tokens": len(prompt.token_ids)}


def rendered(service: Service, body: CountRequest, budget: TokenBudget) -> ChatPrompt:
    """As in the protocol, there is no thinking unless it is asked for."""
    thinking = body.thinking or {"type": "disabled"}
    config = body.output_config or OutputConfig()
    arguments = from_anthropic(body.messages, body.system, body.tools, body.tool_choice, thinking)
    return render(
        service.tokenizer,
        **arguments,
        reasoning_effort=config.effort,
        response_format=response_format(config.format),
        budget=budget,
    )


def response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """Anthropic's format in OpenAI's form."""
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise ApiError(400, "output_config.format's type must be json_schema", param="output_config")
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def sampling(service: Service, body: MessagesRequest, prompt: ChatPrompt) -> SamplingParams:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": tuple(body.stop_sequences) if body.stop_sequences else None,
        "logit_bias": dict.fromkeys(prompt.forbidden, FORBIDDING_BIAS),
        "grammar": prompt.grammar,
        "max_tokens": body.max_tokens,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


@dataclass
class Blocks:
    """The reply's content blocks so far, and the events that tell of each change.

    A stream shows a tool call that is cut off as far as it came, and its stop reason says so; among `whole`
    blocks there is none, as `input` must be an object.
    """

    whole: list[dict[str, Any]] = field(default_factory=list)
    begun: int = 0
    open: dict[str, Any] | None = None
    parts: list[str] = field(default_factory=list)  # of the open block's text, or of its arguments

    def push(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case ReasoningDelta(text):
                return self._add_text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case TextDelta(text):
                return self._add_text({"type": "text", "text": ""}, text)
            case ToolCallStart(_, call_id, name):
                return self._start({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolArgumentsDelta(_, fragment):
                return [self._delta("input_json_delta", "partial_json", fragment)]
            case ToolCallEnd():
                return self.close(called=True)

    def close(self, called: bool = False) -> list[dict[str, Any]]:
        """End the open block, if there is one. called: it is a tool call, and complete."""
        if self.open is None:
            return []
        kind, text = self.open["type"], "".join(self.parts)
        if kind != "tool_use":
            self.whole.append({**self.open, kind: text})
        elif called:
            self.whole.append({**self.open, "input": json.loads(text)})
        self.open = None
        return [{"type": "content_block_stop", "index": self.begun - 1}]

    def _add_text(self, block: dict[str, Any], text: str) -> list[dict[str, Any]]:
        kind = block["type"]
        same = self.open is not None and self.open["type"] == kind
        return [*([] if same else self._start(block)), self._delta(f"{kind}_delta", kind, text)]

    def _start(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self.close()
        self.open, self.parts = block, []
        self.begun += 1
        return [*closed, {"type": "content_block_start", "index": self.begun - 1, "content_block": block}]

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        self.parts.append(text)
        return {"type": "content_block_delta", "index": self.begun - 1, "delta": {"type": kind, name: text}}


@dataclass
class MessageAnswer:
    """The response, in events or whole."""

    service: Service
    submission: Submission
    prompt: ChatPrompt
    reply: ChatReply
    blocks: Blocks = field(default_factory=Blocks)

    async def events(self) -> AsyncGenerator[bytes, None]:
        yield named_event({"type": "message_start", "message": self._message(None)})
        yield PING
        async for _, output in self.submission.outputs():
            for event in self.reply.push(output):
                for told in self.blocks.push(event):
                    yield named_event(told)
            if output.finish_reason is not None:
                for told in self.blocks.close():
                    yield named_event(told)
                end = {"type": "message_delta", "delta": self._stop(output), "usage": self._usage(output)}
                yield named_event(end)
        yield named_event({"type": "message_stop"})

    async def whole(self) -> dict[str, Any]:
        last = None
        with self.submission:
            async for _, output in self.submission.outputs():
                for event in self.reply.push(output):
                    self.blocks.push(event)
                last = output
        self.blocks.close()
        return self._message(last)

    def _message(self, last: Output | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self.submission.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.service.options.model_name,
            "content": self.blocks.whole,
            **self._stop(last),
            "usage": self._usage(last),
        }

    def _stop(self, last: Output | None) -> dict[str, Any]:
        """Raises ApiError for a request that was aborted: the protocol has no reason for that."""
        if last is None:
            return {"stop_reason": None, "stop_sequence": None}
        if last.finish_reason == "abort":
            self.submission.service.check_admission()
            raise ApiError(ABORTED, "the request was aborted")
        if last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "tool_use" if self.reply.ended_in_calls else "end_turn", "stop_sequence": None}

    def _usage(self, last: Output | None) -> dict[str, Any]:
        """Tokens from the cache are counted apart from the others, as in the protocol."""
        cached = last.cached_tokens if last is not None else 0
        return {
            "input_tokens": len(self.prompt.token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": last.completion_tokens if last is not None else 0,
        }
