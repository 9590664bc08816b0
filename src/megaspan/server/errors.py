"""Errors as each protocol spells them: OpenAI's object, Anthropic's object, both with one line of text."""

import re
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from megaspan.engine.sampling import SamplingParams
from megaspan.errors import UserError

ABORTED = 499  # no protocol has a status for it
LONGEST_MESSAGE = 600

OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = {
    **OPENAI_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
}


NAMED_FIELDS = {
    *(each.name for each in fields(SamplingParams)),
    *(
        "messages",
        "tools",
        "tool_choice",
        "response_format",
        "reasoning_effort",
        "thinking",
        "chat_template_kwargs",
    ),
}


class ApiError(HTTPException):
    """An answer other than 200: status, one line, and in OpenAI's shape the parameter and a code."""

    headers: dict[str, str]

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        self.message = one_line(message)
        super().__init__(
            status, self.message, {name.replace("_", "-"): text for name, text in headers.items()}
        )
        self.param = param
        self.code = code


def one_line(text: str) -> str:
    """Without line breaks, overlong tails, or halves of surrogate pairs, which no response could carry."""
    text = " ".join(text.encode("utf-8", errors="replace").decode().split())
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"


def speaks_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def openai_error(error: ApiError) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(error.status_code, "server_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": one_line(error.param) if error.param else None,
            "code": error.code,
        }
    }


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status_code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(path: str, error: ApiError) -> JSONResponse:
    """The error in the shape of the protocol that the path belongs to."""
    content = anthropic_error(error) if speaks_anthropic(path) else openai_error(error)
    return JSONResponse(content, status_code=error.status_code, headers=error.headers)


def validation_error(errors: Any) -> ApiError:
    """Pydantic's list of faults folded into one line: the first, and how many more there are."""
    faults = list(errors)
    first = faults[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    if not place and isinstance(first.get("input"), bytes):
        return ApiError(400, "the body was not read as JSON; send Content-Type: application/json")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "unsupported_field":
        return ApiError(400, message, param=first["ctx"]["field"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return ApiError(400, f"{place or 'the body'}: {message}{more}", param=place.partition(".")[0] or None)


def named_field(message: str) -> str | None:
    """The field that a sentence begins with: an error's message says what is wrong with it."""
    first = re.match(r"\w*", message)
    return first[0] if first and first[0] in NAMED_FIELDS else None


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception; only those that nobody foresaw are a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error), param=named_field(str(error)))
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Every exception of a handler becomes a response in the path's protocol."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        api_error = as_api_error(error)
        if type(error) is HTTPException and error.status_code in (404, 405):
            reason = "no such path" if error.status_code == 404 else "not for this path"
            api_error = ApiError(error.status_code, f"{reason}: {request.method} {request.url.path}")
            api_error.headers.update(error.headers or {})
        return error_response(request.url.path, api_error)

    for kind in (ApiError, UserError, RequestValidationError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, answer)
