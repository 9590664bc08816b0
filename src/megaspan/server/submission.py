"""The engine's requests behind one HTTP request."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from megaspan.engine.request import Output
from megaspan.server.errors import ABORTED, ApiError

if TYPE_CHECKING:
    from megaspan.server.service import Service

Made = TypeVar("Made")


class OutputStream(Protocol):
    """Outputs of one request, the last of which has a finish reason."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[Output]: ...


class Submission:
    """The engine's requests behind one HTTP request. Leaving it aborts whatever has not finished."""

    def __init__(self, service: "Service", request_id: str) -> None:
        self.service = service
        self.request_id = request_id
        self.streams: list[OutputStream] = []
        self.preparing: asyncio.Future[Any] | None = None
        self.aborted = False  # before it reached the engine
        self.finished: set[int] = set()
        self.arrival = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def prepared(self, work: Coroutine[Any, Any, Made]) -> Made:
        """What the work makes. Raises ApiError when the request is aborted meanwhile."""
        self.preparing = asyncio.ensure_future(work)
        try:
            made = await self.preparing
            if not self.aborted:
                return made
        except asyncio.CancelledError:
            if not self.aborted:
                raise  # the client is gone
        self.service.check_admission()
        raise ApiError(ABORTED, "the request was aborted", code="aborted")

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(place of its prompt, output) as they come, measured. Raises ApiError when the engine fails one."""
        metrics = self.service.metrics
        previous = [0.0] * len(self.streams)
        async with aclosing(interleave([aiter(stream) for stream in self.streams])) as outputs:
            async for place, output in outputs:
                if output.token_ids:
                    now = time.perf_counter()
                    metrics.observe_tokens(now, previous[place] or None, self.arrival, len(output.token_ids))
                    previous[place] = now
                if output.finish_reason is not None:
                    self.finished.add(place)
                    metrics.observe_end(time.perf_counter() - self.arrival, output)
                if output.finish_reason == "error":
                    raise self._failure(output)
                yield place, output

    def _failure(self, output: Output) -> ApiError:
        """A client's own grammar can lead to where no token fits, and asking again would lead there again."""
        message = f"the engine failed: {output.error}"
        if output.error_kind == "grammar":
            return ApiError(400, message, code="grammar_error")
        if output.error_kind == "memory":
            return ApiError(503, message, code="out_of_memory", Retry_After="1")
        return ApiError(500, message, code="engine_error")

    def abort(self) -> bool:
        """End what has not finished; False when all of it has."""
        if self.preparing is not None and not self.streams:
            self.aborted = True
            self.preparing.cancel()
            return True
        unfinished = [stream for place, stream in enumerate(self.streams) if place not in self.finished]
        return any([self.service.engine.abort(stream.request_id) for stream in unfinished])

    def close(self) -> None:
        self.abort()
        self.service.running.pop(self.request_id, None)


async def interleave(streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output], None]:
    """(place of its stream, output) of several streams, each read only as fast as the caller reads."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place, output = waiting.pop(task), task.result()
                if output is not None:
                    waiting[asyncio.ensure_future(anext(streams[place], None))] = place
                    yield place, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
