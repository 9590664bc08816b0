"""`/v1/messages`: a conversation in, the reply's blocks out, in Anthropic's shape."""

import asyncio
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
from megaspan.server.errors import ApiError, anthropic_error
from megaspan.server.event_stream import EventStream, named_event
from megaspan.server.parser import (
    Event,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from megaspan.server.reply import ChatReply
from megaspan.server.request_fields import FORBIDDING_BIAS, Objects, RequestModel, Texts
from megaspan.server.service import Service, Submission

router = APIRouter()

PING = named_event({"type": "ping"})
ABORTED = 499


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

    max_tokens: int
    stop_sequences: Texts | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@router.post("/v1/messages", response_class=Response)
async def messages(request: Request, body: MessagesRequest) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    prompt = await asyncio.to_thread(rendered, service, body)
    params = sampling(service, body, prompt)
    submission = await service.submit([(prompt.token_ids, params)], request.state)
    parser = ReplyParser(service.tokenizer, prompt.tools, prompt.thinking)
    answer = MessageAnswer(service, submission, prompt, ChatReply(parser, params.stop))
    if body.stream:
        return EventStream(
            submission, answer.events(), lambda error: named_event(anthropic_error(error)), ping=PING
        )
    return JSONResponse(await answer.whole())


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountRequest) -> dict[str, int]:
    service: Service = request.app.state.service
    service.check_model(body.model)
    prompt = await asyncio.to_thread(rendered, service, body)
    return {"input_tokens": len(prompt.token_ids)}


def rendered(service: Service, body: CountRequest) -> ChatPrompt:
    """As in the protocol, there is no thinking unless it is asked for."""
    thinking = body.thinking or {"type": "disabled"}
    config = body.output_config or OutputConfig()
    arguments = from_anthropic(body.messages, body.system, body.tools, body.tool_choice, thinking)
    return render(
        service.tokenizer,
        **arguments,
        reasoning_effort=config.effort,
        response_format=response_format(config.format),
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
        "max_tokens": service.room(prompt.token_ids, body.max_tokens),
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


@dataclass
class Blocks:
    """The reply's content blocks so far, and the events that tell of each change."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    open: bool = False
    arguments: str = ""

    def push(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case ReasoningDelta(text):
                started = self._ensure({"type": "thinking", "thinking": "", "signature": ""})
                self.blocks[-1]["thinking"] += text
                return [*started, self._delta({"type": "thinking_delta", "thinking": text})]
            case TextDelta(text):
                started = self._ensure({"type": "text", "text": ""})
                self.blocks[-1]["text"] += text
                return [*started, self._delta({"type": "text_delta", "text": text})]
            case ToolCallStart(_, call_id, name):
                return self.close() + self._start(
                    {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                )
            case ToolArgumentsDelta(_, fragment):
                self.arguments += fragment
                return [self._delta({"type": "input_json_delta", "partial_json": fragment})]
        return self.close()

    def close(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        if not self.open:
            return []
        self.open = False
        block, arguments, self.arguments = self.blocks[-1], self.arguments, ""
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _ensure(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        same = self.open and self.blocks[-1]["type"] == block["type"]
        return [] if same else self.close() + self._start(block)

    def _start(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self.blocks.append(block)
        self.open = True
        return [{"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


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
        return self._message(last)

    def _message(self, last: Output | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self.submission.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.service.options.model_name,
            "content": self.blocks.blocks,
            **self._stop(last),
            "usage": self._usage(last),
        }

    def _stop(self, last: Output | None) -> dict[str, Any]:
        """Raises ApiError for a request that was aborted: the protocol has no reason for that."""
        if last is None:
            return {"stop_reason": None, "stop_sequence": None}
        if last.finish_reason == "abort":
            raise ApiError(ABORTED, "the request was aborted")
        if last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        called = self.reply.parser.finish_reason == "tool_calls"
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _usage(self, last: Output | None) -> dict[str, Any]:
        """Tokens from the cache are counted apart from the others, as in the protocol."""
        cached = last.cached_tokens if last is not None else 0
        return {
            "input_tokens": len(self.prompt.token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": last.completion_tokens if last is not None else 0,
        }
