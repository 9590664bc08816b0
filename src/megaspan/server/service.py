"""Between HTTP and the engine: who may still come in, which request is whose, and how long each one took."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Protocol, Self, TypeVar

from megaspan.engine.request import Output
from megaspan.engine.sampling import SamplingParams
from megaspan.engine.stats import EngineStats
from megaspan.errors import BadPrompt, ContextTooLong, Overloaded, UserError
from megaspan.server.errors import ABORTED, ApiError
from megaspan.server.metrics import Metrics
from megaspan.server.options import ServerOptions
from megaspan.token_budget import TokenBudget
from megaspan.tokenizer import Tokenizer

Job = tuple[Sequence[int], SamplingParams]
Made = TypeVar("Made")

WORKERS = 4  # threads that parse, encode and compile
MOST_PREPARING = 256  # requests that may wait for them
ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "gen-")


class OutputStream(Protocol):
    """Outputs of one request, the last of which has a finish reason."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[Output]: ...


class ServingEngine(Protocol):
    """What the server needs of an engine; `AsyncEngine` is the one."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def max_context(self) -> int: ...  # tokens of prompt and completion together
    @property
    def is_alive(self) -> bool: ...  # False once its thread has died
    async def start(self) -> None: ...
    async def stop(self, drain_seconds: float = 0) -> None: ...
    def prepare(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> Any: ...  # slow, for any thread
    def enqueue(self, request: Any) -> OutputStream: ...
    def abort(self, request_id: str) -> bool: ...
    def stats(self) -> EngineStats: ...
    async def flush_cache(self) -> int: ...


class Service:
    """The state of one server. Only the event loop's thread changes it; what is slow runs in others."""

    def __init__(self, engine: ServingEngine, options: ServerOptions) -> None:
        if engine.tokenizer is None:
            raise UserError("the model has no tokenizer; a server needs its tokenizer.json")
        self.engine = engine
        self.options = options
        self.tokenizer = engine.tokenizer
        self.metrics = Metrics(engine.stats, options.model_name)
        self.draining = False
        self.created = int(time.time())
        self.serial = itertools.count()
        self.running: dict[str, Submission] = {}
        self.uploads: set[asyncio.Timeout] = set()  # the time limits of bodies on their way
        self.workers = ThreadPoolExecutor(WORKERS, "megaspan-worker")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for any name but the served one; none at all means that one."""
        if name is not None and name != self.options.model_name:
            message = f"there is no model {name!r}; this server has {self.options.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises ApiError for ids outside the vocabulary."""
        last = self.tokenizer.vocab_size - 1
        if ids and (min(ids) < 0 or max(ids) > last):
            raise ApiError(400, f"not all of {field} are tokens; they go from 0 to {last}", param=field)

    def room(self, prompt: Sequence[int], wanted: int | None) -> int:
        """Tokens that may be generated: what was asked for, or as many as the context still holds."""
        left = max(self.engine.max_context - len(prompt), 1)
        return left if wanted is None else min(wanted, left)

    async def in_worker(self, function: Callable[..., Made], *arguments: Any) -> Made:
        """Call it on one of a few threads. Cancelled before its turn has come, it is not called at all."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, function, *arguments)

    async def encoded(self, encode: Callable[[TokenBudget], Made], field: str, prompts: int = 1) -> Made:
        """Call what encodes prompts `in_worker`. Cancelled, it ends at the next piece of text.

        Raises ApiError that names the prompts' field for those that do not fit.
        """
        budget = TokenBudget(self._most_tokens(prompts))
        try:
            return await self.in_worker(encode, budget)
        except BadPrompt as error:
            code = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
            raise ApiError(400, str(error), param=field, code=code) from error
        finally:
            budget.stop()

    async def submit(
        self,
        state: Any,
        prepare: Callable[[TokenBudget], tuple[Sequence[Job], Made]],
        field: str,
        prompts: int = 1,
    ) -> tuple["Submission", Made]:
        """Hand prompts to the engine, all or none. `state`: the HTTP request's, which holds its id.

        `prepare` makes the jobs, and what else its caller wants back, as `encoded` calls it. Raises ApiError
        503 while draining or after the engine died, 429 when too many wait, 499 when the request is aborted
        meanwhile, and 400 for a prompt or parameters that the engine refuses.
        """
        self.check_admission()
        if sum(not submission.streams for submission in self.running.values()) >= MOST_PREPARING:
            raise queue_full(f"{MOST_PREPARING} requests are being prepared already; try again later")
        state.request_id = self._unused(state.request_id)
        submission = self.running[state.request_id] = Submission(self, state.request_id)
        try:
            work = self.encoded(
                lambda budget: self._prepare(prepare(budget), state.request_id), field, prompts
            )
            requests, made = await submission.prepared(work)
            self.check_admission()
            for request in requests:
                submission.streams.append(self.engine.enqueue(request))
        except Overloaded as error:
            submission.close()
            raise queue_full(str(error)) from error
        except BaseException:
            submission.close()
            raise
        return submission, made

    def _prepare(self, prepared: tuple[Sequence[Job], Made], request_id: str) -> tuple[list[Any], Made]:
        """The engine's requests: each prompt checked, each grammar compiled."""
        jobs, made = prepared
        requests, left = [], self._most_tokens(len(jobs))
        for prompt, params in jobs:
            self._check_named_ids(params)
            # The engine may still be ending a request of the same id, whose client came back at once.
            requests.append(self.engine.prepare(prompt, params, f"{request_id}/{next(self.serial)}"))
            left -= len(prompt)
            if left < 0:
                raise ApiError(400, "the choices and prompts are too long together; ask for fewer at once")
        return requests, made

    def _most_tokens(self, prompts: int) -> int:
        """Of all the prompts of a request: a full context for each, but at most for `max_choices` of them."""
        return min(max(prompts, 1), self.options.max_choices) * self.engine.max_context

    def abort(self, request_id: str) -> bool:
        """End a running request, all its choices; False when there is none of that id."""
        for prefix in ID_PREFIXES:
            submission = self.running.get(request_id) or self.running.get(request_id.removeprefix(prefix))
            if submission is not None:
                return submission.abort()
        return False

    def abort_all(self) -> None:
        """End what runs, what is being prepared, and what is still being uploaded."""
        for submission in list(self.running.values()):
            submission.abort()
        for upload in self.uploads:
            if not upload.expired():
                upload.reschedule(0)

    def check_admission(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down; ask another one", Retry_After="5")
        if not self.engine.is_alive:
            raise ApiError(503, "the engine has stopped; the server's log says why")

    def _check_named_ids(self, params: SamplingParams) -> None:
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids(tuple(dict(params.logit_bias)), "logit_bias")

    def _unused(self, request_id: str) -> str:
        while request_id in self.running:
            request_id = f"{request_id[:100]}-{uuid.uuid4().hex[:8]}"
        return request_id


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", Retry_After="1")


class Submission:
    """The engine's requests behind one HTTP request. Leaving it aborts whatever has not finished."""

    def __init__(self, service: Service, request_id: str) -> None:
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
