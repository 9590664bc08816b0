"""`/generate`: token ids in and out with their log-probabilities, for rollouts and for other programs."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megaspan.server.errors import ApiError, openai_error
from megaspan.server.event_stream import DONE, EventStream, data_event
from megaspan.server.json_body import JsonRoute
from megaspan.server.reply import PlainReply, TokenRecord
from megaspan.server.request_fields import MaxTokens, RequestModel, SamplingFields, TokenIds
from megaspan.server.service import Job, Service
from megaspan.server.submission import Submission
from megaspan.token_budget import TokenBudget

router = APIRouter(route_class=JsonRoute)


class GenerateParams(SamplingFields):
    max_new_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None
    logprobs: int | None = None


class GenerateRequest(RequestModel):
    """One prompt, as text or as ids. The header `X-Request-Id` names the request."""

    ignored = frozenset({"return_logprob"})  # log-probabilities always come

    text: str | None = None
    input_ids: TokenIds | None = None
    sampling_params: GenerateParams = GenerateParams()
    stream: bool = False


@router.post("/generate", response_class=Response)
async def generate(request: Request, body: GenerateRequest) -> Response:
    service: Service = request.app.state.service
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", param="input_ids")
    asked = body.sampling_params
    if asked.max_new_tokens is not None and asked.max_tokens is not None:
        raise ApiError(400, "give either max_new_tokens or max_tokens", param="sampling_params")
    wanted = asked.max_tokens if asked.max_new_tokens is None else asked.max_new_tokens

    def prepare(budget: TokenBudget) -> tuple[list[Job], None]:
        prompt = body.input_ids
        if prompt is None:
            prompt = service.tokenizer.encode(body.text or "", budget)
        params = asked.sampling(wanted, asked.logprobs, asked.structure())
        return [(prompt, params)], None

    field = "text" if body.input_ids is None else "input_ids"
    submission, _ = await service.submit(request.state, prepare, field)
    parts = increments(submission, PlainReply(service.tokenizer))
    if body.stream:
        return EventStream(submission, events(parts), lambda error: data_event(openai_error(error)))
    with submission:
        return JSONResponse(joined([part async for part in parts]))


async def increments(submission: Submission, reply: PlainReply) -> AsyncGenerator[dict[str, Any], None]:
    """What each output adds; the last one says how it ended."""
    async for _, output in submission.outputs():
        record = TokenRecord()
        record.add(output)
        part: dict[str, Any] = {
            "text": reply.push(output),
            "output_ids": record.token_ids,
            "logprobs": record.logprobs,
        }
        if output.top_logprobs is not None:
            part["top_logprobs"] = record.top
        if output.finish_reason is not None:
            part["meta_info"] = {
                "id": submission.request_id,
                "finish_reason": {"type": output.finish_reason, "matched": output.stop_reason},
                "prompt_tokens": output.prompt_tokens,
                "completion_tokens": output.completion_tokens,
                "cached_tokens": output.cached_tokens,
                "weights_version": output.weights_version,
            }
        yield part


async def events(parts: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async for part in parts:
        yield data_event(part)
    yield DONE


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The increments as one answer: texts and lists end to end."""
    whole: dict[str, Any] = {"text": "", "output_ids": [], "logprobs": []}
    for part in parts:
        for name, value in part.items():
            whole[name] = whole[name] + value if name in whole else value
    return whole
