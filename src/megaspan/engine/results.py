"""What steps add to requests: their tokens, and how they end."""

import time
from collections.abc import Sequence

import numpy as np

from megaspan.engine.plan import Plan
from megaspan.engine.request import Ending, Output, Request, State, failure
from megaspan.engine.runner import Step
from megaspan.engine.sampler import Sampled
from megaspan.engine.scheduler import Scheduler
from megaspan.engine.stats import Counters, Rate

NOT_FINITE = failure("the model's logits are not finite")


class Results:
    """The requests that are not over, and the outputs that have not been taken yet."""

    def __init__(self, scheduler: Scheduler, counters: Counters):
        self.scheduler, self.counters = scheduler, counters
        self.requests: dict[str, Request] = {}
        self.rate = Rate()
        self._outputs: list[Output] = []

    def record(self, plan: Plan, step: Step, sampled: Sampled | None) -> None:
        """Note what the step read and drew."""
        self.scheduler.advance(plan)
        for request, _ in plan.chunks:
            if request.remaining == 0:
                self.scheduler.begin_decoding(request)
        if sampled is None:
            return
        outputs, ended = self._add_tokens(step, sampled)
        self._outputs.extend(outputs)
        requests = self.scheduler.slots.requests
        for row in np.flatnonzero(ended).tolist():
            request = requests[step.slots[row]]
            assert request is not None
            if row in sampled.failed:
                self._take_back(request, outputs[row])
                ending = exhaustion(request) if row in sampled.exhausted else NOT_FINITE
                self.finish(request, ending, outputs[row])
                continue
            ending = request.ending(outputs[row].token_ids[0])
            if request.stops is not None:
                outputs[row].withheld = request.stops.withheld
            if ending is not None:
                self.finish(request, ending, outputs[row])

    def _add_tokens(self, step: Step, sampled: Sampled) -> tuple[list[Output], np.ndarray]:
        """An output for each drawn token, and which of them [S] may end their requests."""
        slots, drawn = self.scheduler.slots, step.slots
        slots.last[drawn] = sampled.token_ids
        slots.drawn[drawn] += 1
        stopped = (slots.stops[drawn] == sampled.token_ids[:, None]).any(1)
        ended = stopped | (slots.drawn[drawn] >= slots.limit[drawn]) | slots.special[drawn]
        ended[sampled.failed] = True
        outputs, requests = [], slots.requests
        columns = zip(drawn.tolist(), sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)
        for slot, token_id, logprob in columns:
            request = requests[slot]
            assert request is not None
            request.tokens.append(token_id)
            outputs.append(Output(request.id, (token_id,), (logprob,)))
        if any(top is not None for top in sampled.top):
            for output, top in zip(outputs, sampled.top, strict=True):
                output.top_logprobs = None if top is None else (top,)
        self.counters.generation_tokens += len(outputs) - len(sampled.failed)
        self.rate.add(time.monotonic(), len(outputs))
        return outputs, ended

    @staticmethod
    def _take_back(request: Request, output: Output) -> None:
        request.tokens.pop()
        output.token_ids, output.logprobs, output.top_logprobs = (), (), None

    def finish(self, request: Request, ending: Ending, into: Output | None = None) -> None:
        """The request leaves, with a last output, or in the one that it has just been given."""
        output = into or Output(request.id)
        output.finish_reason, output.stop_reason = ending.reason, ending.stop_reason
        output.error, output.error_kind = ending.error, ending.error_kind
        output.prompt_tokens, output.completion_tokens = request.prompt_tokens, request.generated
        output.cached_tokens = max(request.cached_tokens, 0)
        output.weights_version = request.weights_version
        if into is None:
            self._outputs.append(output)
        self.scheduler.remove(request)
        del self.requests[request.id]
        self.counters.requests[ending.reason] += 1

    def fail(self, requests: Sequence[Request], error: str) -> None:
        """End those of the requests that are not over."""
        for request in requests:
            if request.state is not State.finished:
                self.finish(request, failure(error))

    def take(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs


def exhaustion(request: Request) -> Ending:
    """Of a request for which no token is left."""
    reason = "the logit bias leaves no token" if request.grammar is None else request.grammar.error
    return failure(reason, "grammar")
