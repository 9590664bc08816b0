"""What is not generation: models, health, metrics, the panel's figures, cache, abort, tokens."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megaspan.server.errors import ApiError
from megaspan.server.json_body import JsonRoute
from megaspan.server.metrics import CONTENT_TYPE
from megaspan.server.request_fields import RequestModel, TokenIds
from megaspan.server.service import Service

router = APIRouter(route_class=JsonRoute)


class AbortRequest(RequestModel):
    request_id: str


class TokenizeRequest(RequestModel):
    model: str | None = None
    text: str


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: TokenIds


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """503 while the server drains, and once the engine has died."""
    service: Service = request.app.state.service
    if service.draining:
        raise ApiError(503, "the server is shutting down")
    if not service.engine.is_alive:
        raise ApiError(503, "the engine has stopped; the server's log says why")
    return {"status": "ok"}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    return Response(request.app.state.service.metrics.exposition(), media_type=CONTENT_TYPE)


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """What the engine is doing, as JSON; times in seconds."""
    service: Service = request.app.state.service
    names = {"model": service.options.model_name, "max_context": service.engine.max_context}
    return {**service.metrics.summary(), **names, "draining": service.draining}


@router.post("/flush_cache")
async def flush_cache(request: Request) -> dict[str, int]:
    """Forget every cached page that no running request uses."""
    return {"pages": await request.app.state.service.engine.flush_cache()}


@router.post("/abort")
async def abort(request: Request, body: AbortRequest) -> JSONResponse:
    """End a running request by the id of its response or of its `X-Request-Id`; 404 when none has it."""
    if not request.app.state.service.abort(body.request_id):
        raise ApiError(404, f"no request {body.request_id!r} is running", param="request_id")
    return JSONResponse({"aborted": body.request_id})


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.check_model(body.model)
    tokens = await service.encoded(lambda budget: service.tokenizer.encode(body.text, budget), "text")
    return {"tokens": tokens, "count": len(tokens), "max_context": service.engine.max_context}


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """The text of the ids, special tokens spelled out."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    service.check_ids(body.tokens, "tokens")
    return {"text": await service.in_worker(service.tokenizer.decode, body.tokens)}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(request.app.state.service)]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.check_model(name)
    return model_card(service)


def model_card(service: Service) -> dict[str, Any]:
    name = service.options.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "megaspan",
        "max_model_len": service.engine.max_context,
        "type": "model",  # this and the next: Anthropic's list
        "display_name": name,
    }
