"""Server-sent events: a response that sends each event when it is made and makes the next when it is sent."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megaspan.server.errors import ApiError, as_api_error
from megaspan.server.middleware import ClientGone
from megaspan.server.submission import Submission

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
COMMENT = b": ping\n\n"


def data_event(content: Any) -> bytes:
    """OpenAI's framing: one line of data. JSON has no raw line breaks, so one line always suffices."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """Anthropic's framing: the event's type as its name, too."""
    return f"event: {content['type']}\n".encode() + data_event(content)


class EventStream(Response):
    """Sends `events`, a ping after each silence of `ping_seconds`; closes the submission in any case.

    An exception in mid-stream becomes the event that `failure` makes of it, since the status is sent already.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        submission: Submission,
        events: AsyncGenerator[bytes, None],
        failure: Callable[[ApiError], bytes],
        ping: bytes = COMMENT,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.submission = submission
        self.events = events
        self.failure = failure
        self.ping = ping
        self.quiet = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinging = asyncio.ensure_future(self._keep_alive(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._guarded()) as events:
                async for event in events:
                    self.quiet = False
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            pinging.cancel()  # nothing may follow the end
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pinging.cancel()
            self.submission.close()

    async def _guarded(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.events) as events:
            try:
                async for event in events:
                    yield event
            except Exception as error:
                api_error = as_api_error(error)
                if not isinstance(error, ApiError):
                    log.exception("request %s failed in mid-stream", self.submission.request_id)
                yield self.failure(api_error)

    async def _keep_alive(self, send: Send) -> None:
        with suppress(ClientGone):
            while True:
                await asyncio.sleep(self.submission.service.options.ping_seconds)
                if self.quiet:
                    await send({"type": "http.response.body", "body": self.ping, "more_body": True})
                self.quiet = True
