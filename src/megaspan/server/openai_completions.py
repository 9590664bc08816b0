"""`/v1/completions`: text or token ids in, their continuation out, in OpenAI's shape."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Discriminator, Field, Tag

from megaspan.engine.request import Output
from megaspan.server.errors import ApiError, openai_error
from megaspan.server.event_stream import DONE, EventStream, data_event
from megaspan.server.json_body import JsonRoute
from megaspan.server.reply import PlainReply, TokenRecord, openai_usage
from megaspan.server.request_fields import (
    MaxTokens,
    SamplingFields,
    StreamOptions,
    TokenIds,
    derived_seed,
)
from megaspan.server.service import Job, Service
from megaspan.server.submission import Submission
from megaspan.token_budget import TokenBudget

router = APIRouter(route_class=JsonRoute)

MOST_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def prompt_kind(prompt: Any) -> str:
    """Which of the four forms it has, as far as its first element tells."""
    if not isinstance(prompt, list):
        return "text"
    if prompt and isinstance(prompt[0], str | list):
        return "texts" if isinstance(prompt[0], str) else "id_lists"
    return "ids"


SEVERAL = Field(fail_fast=True, max_length=MOST_PROMPTS)
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], SEVERAL, Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], SEVERAL, Tag("id_lists")],
    Discriminator(prompt_kind),
]


class CompletionRequest(SamplingFields):
    """OpenAI's fields; vLLM's for sampling, structured output and token ids."""

    ignored = frozenset({"user", "metadata", "service_tier", "priority", "prompt_cache_key"})

    model: str | None = None
    prompt: Prompt
    max_tokens: MaxTokens | None = None
    n: int = 1
    echo: bool = False
    logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


@dataclass
class Choice:
    """One continuation on its way: prompt, what has come, and how many characters of it are sent."""

    prompt: list[int]
    echo: str
    reply: PlainReply
    record: TokenRecord = field(default_factory=TokenRecord)
    text: str = ""
    offset: int = 0
    last: Output | None = None

    def push(self, output: Output) -> str:
        self.record.add(output)
        shown = self.reply.push(output)
        self.text += shown
        self.last = output
        return shown


@router.post("/v1/completions", response_class=Response)
async def completions(request: Request, body: CompletionRequest) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    check(body, service.options.max_choices)
    several = prompt_kind(body.prompt) in ("texts", "id_lists")
    prompts: Any = body.prompt if several else [body.prompt]

    def prepare(budget: TokenBudget) -> tuple[list[Job], list[Choice]]:
        grammar = body.structure()
        jobs, choices = [], []
        for prompt in prompts:
            token_ids = service.tokenizer.encode(prompt, budget) if isinstance(prompt, str) else prompt
            echo = echoed(service, prompt) if body.echo else ""
            wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            params = body.sampling(wanted, body.logprobs, grammar)
            for copy in range(body.n):
                jobs.append((token_ids, replace(params, seed=derived_seed(params.seed, copy))))
                choices.append(Choice(token_ids, echo, PlainReply(service.tokenizer)))
        return jobs, choices

    submission, choices = await service.submit(request.state, prepare, "prompt", len(prompts))
    answer = CompletionAnswer(service, body, submission, choices)
    if body.stream:
        return EventStream(answer.submission, answer.chunks(), lambda error: data_event(openai_error(error)))
    return JSONResponse(await answer.whole())


def check(body: CompletionRequest, max_choices: int) -> None:
    """Raises ApiError for what fields ask together, or beyond this server's bounds."""
    if not 1 <= body.n <= max_choices:
        raise ApiError(400, f"n is {body.n}; it must be from 1 to {max_choices}", param="n")
    if not body.prompt and isinstance(body.prompt, list):
        raise ApiError(400, "prompt holds no prompts; give at least one", param="prompt")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported; ask for one of them", param="echo")
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def echoed(service: Service, prompt: str | list[int]) -> str:
    """The prompt as text. Raises ApiError for ids that are no tokens."""
    if isinstance(prompt, str):
        return prompt
    service.check_ids(prompt, "prompt")
    return service.tokenizer.decode(prompt)


@dataclass
class CompletionAnswer:
    """The response, in chunks or whole."""

    service: Service
    body: CompletionRequest
    submission: Submission
    choices: list[Choice]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for index, choice in enumerate(self.choices):
            if choice.echo:
                yield data_event(self._envelope([self._choice(index, choice.echo)]))
        async for index, output in self.submission.outputs():
            text = self.choices[index].push(output)
            if text or output.finish_reason is not None:
                yield data_event(self._envelope([self._choice(index, text, output)]))
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield data_event(self._envelope([], self._usage()))
        yield DONE

    async def whole(self) -> dict[str, Any]:
        with self.submission:
            async for index, output in self.submission.outputs():
                self.choices[index].push(output)
        whole = [
            self._choice(index, choice.echo + choice.text, choice.last)
            for index, choice in enumerate(self.choices)
        ]
        return self._envelope(whole, self._usage())

    def _choice(self, index: int, text: str, output: Output | None = None) -> dict[str, Any]:
        choice = self.choices[index]
        content: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if output is None:
            return content
        record = choice.record.take()
        content["finish_reason"] = output.finish_reason
        if self.body.logprobs is not None:
            tokenizer = self.service.tokenizer
            content["logprobs"] = record.completion_logprobs(tokenizer, self.body.logprobs, choice.offset)
        choice.offset += len(text)
        if self.body.return_token_ids:
            content["token_ids"] = record.token_ids
            content["prompt_token_ids"] = choice.prompt
        if isinstance(output.stop_reason, str):
            content["stop_reason"] = output.stop_reason
        return content

    def _envelope(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        content = {
            "id": f"cmpl-{self.submission.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.service.options.model_name,
            "choices": choices,
        }
        return content if usage is None else {**content, "usage": usage}

    def _usage(self) -> dict[str, Any]:
        ends = [choice.last for choice in self.choices if choice.last is not None]
        prompts = sum(len(choice.prompt) for choice in self.choices[:: self.body.n])
        generated = sum(end.completion_tokens for end in ends)
        return openai_usage(prompts, generated, sum(end.cached_tokens for end in ends[:: self.body.n]), 0)
