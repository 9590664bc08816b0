"""Between HTTP and the engine: who may still come in, which request is whose, and how long each one took."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from megaspan.engine.sampling import SamplingParams
from megaspan.engine.stats import EngineStats
from megaspan.errors import BadPrompt, ContextTooLong, Overloaded, UserError
from megaspan.server.errors import ApiError
from megaspan.server.metrics import Metrics
from megaspan.server.options import ServerOptions
from megaspan.server.submission import OutputStream, Submission
from megaspan.token_budget import TokenBudget
from megaspan.tokenizer import Tokenizer

Job = tuple[Sequence[int], SamplingParams]
Made = TypeVar("Made")

WORKERS = 4  # threads that parse and encode
MOST_PREPARING = 256  # requests that may wait for them
MOST_COMPILING = 16  # requests whose grammars are compiled, one after the other, on threads of their own
ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "gen-")


class ServingEngine(Protocol):
    """What the server needs of an engine; `AsyncEngine` is the one."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def max_context(self) -> int: ...  # tokens of prompt and completion together
    @property
    def is_alive(self) -> bool: ...  # False once its thread has died
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
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
        self.compilers = ThreadPoolExecutor(MOST_COMPILING, "megaspan-compiler")
        self.compiling = 0

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

    async def in_worker(self, function: Callable[..., Made], *arguments: Any) -> Made:
        """Call it on one of a few threads. Cancelled before its turn has come, it is not called at all."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, function, *arguments)

    async def in_compiler(self, function: Callable[..., Made], *arguments: Any) -> Made:
        """The same, on threads that wait for each other's grammars. Raises ApiError 429 for one too many."""
        if self.compiling == MOST_COMPILING:
            raise queue_full(f"{MOST_COMPILING} requests' grammars are being compiled; try again later")
        self.compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.compilers, function, *arguments)
        finally:
            self.compiling -= 1

    async def encoded(self, encode: Callable[[TokenBudget], Made], field: str, prompts: int = 1) -> Made:
        """Call what encodes prompts `in_worker`. Cancelled, it ends at the next piece of text.

        Raises ApiError that names the prompts' field for those that do not fit.
        """
        budget = TokenBudget(self._most_tokens(prompts))
        try:
            with naming(field):
                return await self.in_worker(encode, budget)
        finally:
            budget.stop()

    async def submit(
        self,
        state: Any,
        prepare: Callable[[TokenBudget], tuple[Sequence[Job], Made]],
        field: str,
        prompts: int = 1,
    ) -> tuple[Submission, Made]:
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
            work = self._prepared(prepare, state.request_id, field, prompts)
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

    async def _prepared(
        self,
        prepare: Callable[[TokenBudget], tuple[Sequence[Job], Made]],
        request_id: str,
        field: str,
        prompts: int,
    ) -> tuple[list[Any], Made]:
        """The engine's requests. A grammar may take seconds, and is compiled where nobody else waits."""

        def encode(budget: TokenBudget) -> tuple[Sequence[Job], Made, list[Any] | None]:
            jobs, made = prepare(budget)
            has_grammar = any(params.grammar is not None for _, params in jobs)
            return jobs, made, None if has_grammar else self._requests(jobs, request_id)

        jobs, made, requests = await self.encoded(encode, field, prompts)
        if requests is None:
            with naming(field):
                requests = await self.in_compiler(self._requests, jobs, request_id)
        return requests, made

    def _requests(self, jobs: Sequence[Job], request_id: str) -> list[Any]:
        """Each prompt checked, each grammar compiled."""
        requests, left = [], self._most_tokens(len(jobs))
        for prompt, params in jobs:
            self._check_named_ids(params)
            # The engine may still be ending a request of the same id, whose client came back at once.
            requests.append(self.engine.prepare(prompt, params, f"{request_id}/{next(self.serial)}"))
            left -= len(prompt)
            if left < 0:
                raise ApiError(400, "the choices and prompts are too long together; ask for fewer at once")
        return requests

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


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Turns what is wrong with a prompt into an ApiError that names its field."""
    try:
        yield
    except BadPrompt as error:
        code = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
        raise ApiError(400, str(error), param=field, code=code) from error


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", Retry_After="1")
