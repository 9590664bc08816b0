"""Request bodies as JSON: large ones are read beside the event loop, and overfull ones not at all."""

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from megaspan.server.errors import ApiError
from megaspan.server.service import Service

SMALL = 1 << 16  # bytes, a millisecond's work
SPARE_VALUES = 1 << 17  # beside the prompt's ids, if it comes as such: messages, tools, schemas
MOST_PARTS = 1 << 17  # lists, objects and their keys: each takes as long as ten numbers
QUOTE, COMMA, COLON, LIST, OBJECT = b'",:[{'


class JsonRoute(APIRoute):
    """A route whose body is read by `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises ApiError for what is no JSON, and for more of it than a prompt that fits can need."""
        body = await self.body()
        service: Service = self.app.state.service
        most = service.engine.max_context + SPARE_VALUES
        return parse(body, most) if len(body) <= SMALL else await service.in_worker(parse, body, most)


def parse(body: bytes, most_values: int) -> Any:
    if len(body) > SMALL:
        values, parts = count_values(body)
        if values > most_values or parts > MOST_PARTS:
            message = f"the body has {values} values and {parts} lists, objects and keys: it is too intricate"
            raise ApiError(400, message, code="context_length_exceeded")
    try:
        return from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error}", code="invalid_json") from error


def count_values(body: bytes) -> tuple[int, int]:
    """No fewer than the values in a JSON text's outermost one, and than its lists, objects and their keys.

    The parser keeps the interpreter to itself for as long as there are values to make; this does not.
    """
    bytes_N = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    outside_N = np.cumsum(bytes_N == QUOTE, dtype=np.uint8) % 2 == 0  # strings
    containers = int(np.count_nonzero(((bytes_N == LIST) | (bytes_N == OBJECT)) & outside_N))
    keys = int(np.count_nonzero((bytes_N == COLON) & outside_N))
    return containers + int(np.count_nonzero((bytes_N == COMMA) & outside_N)), containers + keys
