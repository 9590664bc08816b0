"""Around every request: its id, its key, a bounded body, and the end of the work when the client is gone."""

import asyncio
import hmac
import re
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megaspan.server.errors import ApiError, error_response
from megaspan.server.service import Service

SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ClientGone(Exception):
    """The client closed the connection or has stopped reading; nobody is left to be told."""


class RequestIdentity:
    """Gives each request an id, the client's own if it is sane, and returns it in `X-Request-Id`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        wanted = Headers(scope=scope).get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = wanted if SANE_REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = state["request_id"]  # a submission may have made it unique
                headers["Request-Id"] = state["request_id"]  # the name in Anthropic's protocol
            await send(message)

        await self.app(scope, receive, send_with_id)


class RequireKey:
    """Refuses requests without one of the keys, in `Authorization: Bearer` or `x-api-key`.

    open_paths: those that ask for none.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in self.open_paths
        if guarded and scope["method"] != "OPTIONS" and not self._holds_key(Headers(scope=scope)):
            message = "missing or wrong API key; send it as Authorization: Bearer KEY or as x-api-key"
            error = ApiError(401, message, code="invalid_api_key", WWW_Authenticate="Bearer")
            return await error_response(scope["path"], error)(scope, receive, send)
        await self.app(scope, receive, send)

    def _holds_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        # No early exit: the time taken must not say which key was near.
        return any([hmac.compare_digest(text.encode(), key) for text in given for key in self.keys])


class BoundedBody:
    """Reads the whole body first, up to a limit of bytes and of seconds."""

    def __init__(self, app: ASGIApp, service: Service, max_bytes: int, seconds: float) -> None:
        self.app = app
        self.service = service
        self.max_bytes = max_bytes
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            body = await self._read_in_time(scope, receive)
        except ApiError as error:
            return await error_response(scope["path"], error)(scope, receive, send)
        except ClientGone:
            return
        unread = [body]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self.app(scope, replay, send)

    async def _read_in_time(self, scope: Scope, receive: Receive) -> bytes:
        limit = asyncio.timeout(self.seconds)
        try:
            async with limit:
                self.service.uploads.add(limit)
                return await self._read(scope, receive)
        except TimeoutError:
            self.service.check_admission()
            message = f"the body did not arrive within {self.seconds:g} seconds"
            raise ApiError(408, message, Connection="close") from None
        finally:
            self.service.uploads.discard(limit)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        too_large = ApiError(413, f"the body is larger than {self.max_bytes} bytes", Connection="close")
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            raise too_large
        pieces, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece, more = message.get("body", b""), message.get("more_body", False)
            pieces.append(piece)
            size += len(piece)
            if size > self.max_bytes:
                raise too_large
        return b"".join(pieces)


class WatchedConnection:
    """Cancels the work on a request as soon as its client disconnects or leaves the answer unread.

    `send` blocks while the client does not read, so the work waits with it and nothing piles up here.
    """

    def __init__(self, app: ASGIApp, stall_seconds: float) -> None:
        self.app = app
        self.stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        gone, body_read = asyncio.Event(), asyncio.Event()

        async def receive_body() -> Message:
            if not body_read.is_set():
                message = await receive()
                if not message.get("more_body", False):
                    body_read.set()
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self.stall_seconds):
                    await send(message)
            except (TimeoutError, OSError) as error:
                raise ClientGone from error

        async def watch() -> None:
            await body_read.wait()
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        await run_while(self.app(scope, receive_body, send_in_time), watch())


async def run_while(work: Any, watch: Any) -> None:
    """Run `work` until it ends or `watch` does, whichever is first; then cancel the other one."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        outcome = (await asyncio.gather(working, watching, return_exceptions=True))[0]
    if isinstance(outcome, Exception) and not isinstance(outcome, ClientGone):
        raise outcome
