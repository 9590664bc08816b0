"""The engine: many requests over one model and one cache, a step at a time."""

import logging
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from megaspan.cache.jobs import RestoreFailed
from megaspan.engine.config import EngineConfig
from megaspan.engine.intake import Intake
from megaspan.engine.memory import Memory
from megaspan.engine.pace import StepCost
from megaspan.engine.plan import Plan
from megaspan.engine.request import Ending, Output, Request, State, failure
from megaspan.engine.results import Results
from megaspan.engine.runner import Runner
from megaspan.engine.sampler import Sampler
from megaspan.engine.sampling import SamplingParams
from megaspan.engine.scheduler import Scheduler
from megaspan.engine.stats import Counters, EngineStats
from megaspan.errors import Overloaded, UserError
from megaspan.model.folder import LanguageModel
from megaspan.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine:
    """Serves requests over a model. `submit` and its halves, and `abort`, may be called from any thread,
    all else from one.

    model: its device and dtype are the engine's; loaded batch-invariant, a request's tokens do not
    depend on its company. tokenizer: for stop strings and grammars (None: the model's own, if it has one).
    """

    def __init__(
        self, model: LanguageModel, config: EngineConfig | None = None, tokenizer: Tokenizer | None = None
    ):
        self.config = config or EngineConfig()
        self.model, self.model_config = model, model.config
        self.tokenizer = tokenizer or model.tokenizer
        self.cost, self.counters = StepCost(), Counters()
        self.memory = Memory(model, self.config, self.cost)
        self.max_context = self.config.context_limit(model.config, self.memory.pools.total_pages)
        self._intake = Intake(model.config, self.max_context, self.tokenizer)
        device = model.lm_head.weight.device
        vocabulary = self.tokenizer.vocab_size if self.tokenizer is not None else model.config.vocab_size
        self.sampler = Sampler(min(vocabulary, model.config.vocab_size), self.config.max_running, device)
        self.runner = Runner(model, self.memory.paged, self.sampler)
        self.scheduler = Scheduler(
            self.config,
            self.memory.prefixes,
            self.memory.paged,
            self.cost,
            self.counters,
            self._enter,
            self._leave,
        )
        self.results = Results(self.scheduler, self.counters)
        self.requests = self.results.requests
        self._arrivals: deque[Request] = deque()
        self._aborts: deque[Request] = deque()
        self._stuck_since: float | None = None

    # ---- requests

    def submit(
        self, prompt: Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt of token ids; returns the request's id. UserError for what cannot be served."""
        request = self.prepare(prompt, params, request_id)
        self.enqueue(request)
        return request.id

    def prepare(
        self, prompt: Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> Request:
        """A request that can be queued, its grammar compiled. Takes a while for a large one; changes nothing.

        UserError for what cannot be served.
        """
        return self._intake.prepare(prompt, params or SamplingParams(), request_id)

    def enqueue(self, request: Request) -> None:
        """Queue a prepared request, once. Overloaded when too many are, UserError for an id that runs."""
        if len(self.requests) >= self.config.max_waiting + self.config.max_running:
            raise Overloaded(f"{len(self.requests)} requests are running or waiting: try again later")
        is_new = request.state is State.waiting and request.id not in self.requests
        if not is_new or self.requests.setdefault(request.id, request) is not request:
            raise UserError(f"a request {request.id!r} is running already: choose another id")
        self._arrivals.append(request)

    def abort(self, request_id: str) -> bool:
        """Finish a request as soon as the current step ends, whatever it is doing; False if there is none."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._aborts.append(request)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Output]]:
        """Serve prompts to their ends; returns each one's outputs, in order. For scripts: blocks."""
        many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = [self.submit(prompt, each) for prompt, each in zip(prompts, many, strict=True)]
        outputs: dict[str, list[Output]] = {request_id: [] for request_id in ids}
        while any(request_id in self.requests for request_id in ids):
            for output in self.step():
                outputs.setdefault(output.request_id, []).append(output)
        return [outputs[request_id] for request_id in ids]

    # ---- a step

    def warm_up(self) -> None:
        """Do once what is slow the first time, such as compiling, before a request waits for it."""
        self.runner.warm_up()

    def step(self) -> list[Output]:
        """Run one step; returns what it added to requests. Waits a moment where only transfers go on."""
        self._obey_aborts()
        self._prepare()
        plan = self.scheduler.plan()
        if plan is None:
            self._wait()
            return self.results.take()
        self._stuck_since = None
        try:
            self._carry_out(plan)
        except RestoreFailed:
            self._recompute(plan)
        except Exception as error:
            log.exception("a step failed")
            self.runner.settle()
            # A step that fails must not take the engine with it: its requests end, the others go on.
            self.results.fail(plan.requests(self.scheduler.slots), f"the step failed: {error}")
        return self.results.take()

    def _carry_out(self, plan: Plan) -> None:
        step = self.runner.build(plan, self.scheduler.slots)
        self.memory.paged.depend_on(plan.restores)
        self.runner.start(step)
        self._prepare()
        sampled, seconds = self.runner.finish()
        self._measure(plan, seconds)
        self.results.record(plan, step, sampled)

    def _prepare(self) -> None:
        """What a step needs and the one before it does not touch: done while that computes."""
        self._receive()
        self.memory.prefixes.poll()
        self.scheduler.admit()

    def _receive(self) -> None:
        while self._arrivals:
            request = self._arrivals.popleft()
            if request.state is not State.finished:  # aborted before it got here
                self.scheduler.add(request)

    def _obey_aborts(self) -> None:
        while self._aborts:
            request = self._aborts.popleft()
            if request.state is not State.finished:
                self.results.finish(request, Ending("abort"))

    def _wait(self) -> None:
        """Nobody can run: transfers will end in a moment, or a request can never be served."""
        scheduler, now = self.scheduler, time.monotonic()
        if scheduler.is_empty:
            return
        if self._stuck_since is None or scheduler.loading:
            self._stuck_since = now
        stuck = [*scheduler.waiting, *scheduler.reading]
        if stuck and now - self._stuck_since > 2 * self.config.load_timeout:
            self.results.finish(stuck[0], failure("no memory came free for the request in time", "memory"))
            self._stuck_since = now
        time.sleep(0.0005)

    def _recompute(self, plan: Plan) -> None:
        """A layer that the step waited for did not come: the step does not count, what failed is computed."""
        for request, _ in plan.chunks:
            if (
                request.lease is not None
                and request.lease.restore is not None
                and request.lease.restore.error
            ):
                self.scheduler.give_up_restore(request)

    def _measure(self, plan: Plan, seconds: float) -> None:
        self.counters.steps += 1
        self.counters.prompt_tokens += plan.tokens
        if not plan.chunks:
            self.cost.measured_decode(seconds)
        elif not plan.restores:
            self.cost.measured_chunks(plan.tokens, plan.pairs, seconds, len(plan.decoding) > 0)

    # ---- what the scheduler asks back

    def _enter(self, request: Request) -> None:
        slot = self.scheduler.slots.enter(request)
        prompt = request.tokens[: request.prompt_tokens]
        generated = request.tokens[request.prompt_tokens :]
        self.sampler.admit(slot, request.params, prompt, generated, request.seed, request.stop_ids)

    def _leave(self, request: Request) -> None:
        self.memory.paged.release(request.slot)
        self.sampler.release(request.slot)
        self.scheduler.slots.leave(request)

    # ---- the whole

    @property
    def weights_version(self) -> str:
        return self.scheduler.weights_version

    def set_weights_version(self, version: str) -> None:
        """For after a weight change: requests that begin to be read from now on share prefixes only with
        others of this version. Those that run go on with the rows they have, and share no more of them.
        """
        self.scheduler.weights_version = version

    def flush_cache(self) -> int:
        """Forget all prefixes, on device, host and disk: no request that begins from now on is given rows
        computed before. Returns the device pages freed; what running requests use stays theirs to the end.
        """
        return self.memory.prefixes.flush()

    def stats(self) -> EngineStats:
        """A snapshot; may be called from any thread, and is then not exact."""
        scheduler, counters = self.scheduler, self.counters
        return EngineStats(
            running=len(scheduler.reading) + int(np.count_nonzero(scheduler.slots.is_decoding)),
            waiting=len(scheduler.waiting) + len(self._arrivals),
            loading=len(scheduler.loading),
            preempted_total=counters.preempted,
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            requests_total=dict(counters.requests),
            steps_total=counters.steps,
            tokens_per_second=self.results.rate.at(time.monotonic()),
            weights_version=self.weights_version,
            **self.memory.stats(),
        )

    def check(self) -> None:
        """AssertionError unless all pages, slots and requests are accounted for."""
        self.memory.prefixes.check()
        slots = self.scheduler.slots
        seated = [request for request in slots.requests if request is not None]
        assert len(slots.free) + len(seated) == len(slots.requests), "slots"
        if self.scheduler.is_empty:
            idle = not seated and not self.memory.prefixes.leases
            assert idle, "an idle engine holds slots or leases"

    def close(self) -> None:
        """Stop the threads and processes. Requests that are still there are dropped."""
        self._intake.close()
        self.runner.close()
        self.memory.close()
