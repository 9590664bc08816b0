"""The engine on a thread of its own, with a stream of outputs for each request."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence

from megaspan.engine.engine import Engine
from megaspan.engine.request import Output, Request
from megaspan.engine.sampling import SamplingParams
from megaspan.engine.stats import EngineStats
from megaspan.errors import UserError
from megaspan.ops.threads import use_no_team
from megaspan.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Stream:
    """The outputs of one request, one at each step that adds to it; the last has a finish_reason.

    Iterating stops after the last. Closing or cancelling the iteration before aborts the request.
    """

    def __init__(self, engine: "AsyncEngine", request_id: str):
        self.request_id = request_id
        self._engine = engine
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._iteration = self._iterate()
        self.finished = False

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._iteration

    async def aclose(self) -> None:
        """Stop listening; the request is aborted unless it is finished."""
        await self._iteration.aclose()
        self._leave()

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    async def _iterate(self):
        try:
            while not self.finished:
                output = await self._outputs.get()
                self.finished = output.finish_reason is not None
                yield output
        finally:
            self._leave()

    def _leave(self) -> None:
        if not self.finished:
            self.finished = True
            self._engine.abort(self.request_id)


class AsyncEngine:
    """Runs an Engine for asyncio. `start` before use; all but `prepare` belong to the event loop."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._streams: dict[str, Stream] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushes: list[asyncio.Future[int]] = []
        self._failed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @property
    def max_context(self) -> int:
        """Most tokens of a request, prompt and completion together."""
        return self.engine.max_context

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._failed

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="megaspan-engine", daemon=True)
        self._thread.start()

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Let requests finish for so long, abort the others, and end the thread."""
        deadline = time.monotonic() + drain_seconds
        while self._streams and self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10.0)
        await asyncio.to_thread(self.engine.close)  # what is saved then may take seconds

    def submit(
        self, prompt: Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> Stream:
        """Queue a prompt of token ids. UserError at once for what cannot be served."""
        return self.enqueue(self.prepare(prompt, params, request_id))

    def prepare(
        self, prompt: Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> Request:
        """The slow half of `submit`, for any thread: checks the prompt and compiles its grammar."""
        return self.engine.prepare(prompt, params, request_id)

    def enqueue(self, request: Request) -> Stream:
        """The other half: queue what was prepared."""
        self._check_running()
        if request.id in self._streams:
            raise UserError(f"a request {request.id!r} is running already: choose another id")
        self.engine.enqueue(request)
        stream = self._streams[request.id] = Stream(self, request.id)
        with self._wake:
            self._wake.notify()
        return stream

    def abort(self, request_id: str) -> bool:
        """Finish a request at once; False if there is none of that id."""
        known = self.engine.abort(request_id)
        with self._wake:
            self._wake.notify()
        return known

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def flush_cache(self) -> int:
        """Forget all cached prefixes, in every tier; returns the device pages freed."""
        self._check_running()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._flushes.append(done)
            self._wake.notify()
        return await done

    def _check_running(self) -> None:
        if self._stopping or not self.is_alive:
            raise UserError("the engine is not running: start it anew")

    def _run(self) -> None:
        """The engine's thread: a step after the other, asleep while there is nothing to do."""
        assert self._loop is not None
        use_no_team()
        try:
            while self._await_work():
                if count := len(self._flushes):
                    pages = self.engine.flush_cache()
                    with self._wake:
                        flushes, self._flushes = self._flushes[:count], self._flushes[count:]
                    self._loop.call_soon_threadsafe(self._flushed, flushes, pages)
                outputs = self.engine.step()
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        except Exception:
            log.exception("the engine's thread ended")
            self._failed = True
            self._loop.call_soon_threadsafe(self._end_all, "the engine stopped: see the server's log")

    def _await_work(self) -> bool:
        """Sleep until there is something to do; False once there never will be."""
        with self._wake:
            while not (self._stopping or self._flushes or self.engine.has_work):
                # Transfers that ended while idle are taken note of now and then.
                if not self._wake.wait(0.2):
                    self.engine.memory.prefixes.poll()
            return bool(self._flushes) or self.engine.has_work

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finish_reason is not None:
                    del self._streams[output.request_id]

    @staticmethod
    def _flushed(flushes: list[asyncio.Future[int]], pages: int) -> None:
        for done in flushes:
            if not done.done():  # whoever waited may have been cancelled
                done.set_result(pages)

    def _end_all(self, error: str) -> None:
        for request_id in list(self._streams):
            self._deliver([Output(request_id, finish_reason="error", error=error)])
        for done in self._flushes:
            if not done.done():
                done.set_exception(UserError(error))
