"""Runs steps on a thread of its own, so that the next one can be prepared meanwhile."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megaspan.cache.paged import PagedCache
from megaspan.cache.transient import TransientCache
from megaspan.engine.decode_graph import Decode, DecodeGraphs
from megaspan.engine.plan import Plan
from megaspan.engine.sampler import Sampled, Sampler
from megaspan.engine.slots import Slots
from megaspan.model.batch import Batch
from megaspan.model.transformer import Transformer
from megaspan.ops.threads import give_back_team

if TYPE_CHECKING:
    from megaspan.engine.grammar import GrammarState

CLOSING_SECONDS = 5.0  # for the step under way
GRAMMAR_THREADS = 64  # at most; one whose grammar is slow holds up none but its own request


@dataclass
class Step:
    """A plan turned into arrays. batch: what is read, a `Decode` where a graph does it. rows: which of the
    batch's last hidden states are drawn from, for `slots` (None: all); drawn: how many tokens each of these
    has drawn before. grammars: of those of the rows that have one.
    """

    batch: Batch | Decode
    rows: Tensor | None
    slots: np.ndarray
    drawn: np.ndarray
    grammars: dict[int, "GrammarState"]


class Runner:
    """Carries out one step at a time."""

    def __init__(self, model: Transformer, cache: PagedCache, sampler: Sampler):
        self.model, self.cache, self.sampler = model, cache, sampler
        self.device = model.lm_head.weight.device
        self.decoder = DecodeGraphs(model, cache, sampler.slots) if self.device.type == "cuda" else None
        self._work: SimpleQueue[Callable[[], Sampled | None] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Sampled | None, Exception | None, float]] = SimpleQueue()
        self._pending = False
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "megaspan-grammar")
        give_back_team()  # of the thread that loaded the model: the forward thread needs the processors
        self._thread = threading.Thread(target=self._loop, name="megaspan-forward", daemon=True)
        self._thread.start()

    def build(self, plan: Plan, slots: Slots) -> Step:
        """The plan as a batch: decoding requests first, then the chunks."""
        decoding = plan.decoding
        if self.decoder is not None and not plan.chunks and len(decoding) <= self.decoder.most:
            # Without chunks there are no restores to wait for, which a graph could not.
            decode = Decode(slots.last[decoding], slots.cached[decoding], decoding)
            return Step(decode, None, decoding, slots.drawn[decoding], _grammars(decoding, slots))
        pieces, lengths = [slots.last[decoding]], [1] * len(decoding)
        past, table_rows, end = slots.cached[decoding].tolist(), decoding.tolist(), len(decoding)
        last_rows, drawing = [], []  # of the chunks that end their prompts
        for request, count in plan.chunks:
            pieces.append(request.ids(request.computed, request.computed + count))
            lengths.append(count)
            past.append(request.computed)
            table_rows.append(request.slot)
            end += count
            if request.remaining == count:
                last_rows.append(end - 1)
                drawing.append(request.slot)
        token_ids = torch.from_numpy(np.concatenate(pieces, dtype=np.int64)).to(self.device)
        batch = Batch(token_ids, tuple(lengths), tuple(past), slots=tuple(table_rows))
        rows = np.concatenate((np.arange(len(decoding)), np.array(last_rows, dtype=np.int64)))
        drawn = np.concatenate((decoding, np.array(drawing, dtype=np.int64)))
        rows = torch.from_numpy(rows).to(self.device)
        return Step(batch, rows, drawn, slots.drawn[drawn], _grammars(drawn, slots))

    def start(self, step: Step) -> None:
        """Begin the step on the forward thread; `finish` waits for it."""
        for grammar in step.grammars.values():
            grammar.begin_mask(self._grammar_threads)
        self._begin(partial(self._run, step))

    def finish(self) -> tuple[Sampled | None, float]:
        """What the step drew (None: nothing was to be) and the seconds it took; raises what it raised."""
        result, error, seconds = self._done.get()
        self._pending = False
        if error is not None:
            raise error
        return result, seconds

    def warm_up(self) -> None:
        """Run the model once on a few tokens and once on one, capture the graphs, and forget it all."""
        self._begin(self._try_out)
        self.finish()

    def close(self) -> None:
        """End the threads: one that is in PyTorch's code when the interpreter ends aborts the process."""
        self._work.put(None)
        self._thread.join(CLOSING_SECONDS)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    def settle(self) -> None:
        """Wait for a step that was begun and will not be finished: until it ends it writes to its pages."""
        if self._pending:
            self._done.get()
            self._pending = False

    def _begin(self, work: Callable[[], Sampled | None]) -> None:
        self.settle()
        self._pending = True
        self._work.put(work)

    @torch.inference_mode()
    def _loop(self) -> None:
        """The forward thread. Two plain queues: a future's hand-over takes four times as long."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins on the first one
        for work in iter(self._work.get, None):
            began, result, error = time.perf_counter(), None, None
            try:
                result = work()
            except Exception as raised:
                error = raised
            self._done.put((result, error, time.perf_counter() - began))

    def _run(self, step: Step) -> Sampled | None:
        if isinstance(step.batch, Decode):
            assert self.decoder is not None
            logits = self.decoder(step.batch)
        else:
            hidden = self.model(step.batch, self.cache)
            if not len(step.slots):
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # nothing else waits for it, and its time is taken
                return None
            logits = self.model.unembed(hidden[step.rows])
        return self.sampler.sample(logits, step.slots, step.drawn, self._masks(step))

    def _masks(self, step: Step) -> Tensor | None:
        """Grammar masks int32 [S, ceil(V / 32)] of the rows that are drawn from, if any has a grammar."""
        if not step.grammars:
            return None
        masks = torch.full((len(step.slots), -(-self.sampler.vocab_size // 32)), -1, dtype=torch.int32)
        for row, grammar in step.grammars.items():
            grammar.mask(masks[row])
        return masks

    def _try_out(self) -> None:
        for length in (9, 1):
            tokens = torch.zeros(length, dtype=torch.long, device=self.device)
            hidden = self.model(Batch(tokens, (length,), (0,)), TransientCache())
            self.model.unembed(hidden[-1:])
        if self.decoder is not None:
            self.decoder.capture_all()


def _grammars(slots_drawn: np.ndarray, slots: Slots) -> dict[int, "GrammarState"]:
    """The grammars of those of the slots [S] that have one, by their place among them."""
    grammars = {}
    for row in np.flatnonzero(slots.special[slots_drawn]).tolist():
        request = slots.requests[slots_drawn[row]]
        if request is not None and request.grammar is not None:
            grammars[row] = request.grammar
    return grammars
