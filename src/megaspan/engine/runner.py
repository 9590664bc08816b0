"""Runs steps on a thread of its own, so that the next one can be prepared meanwhile."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaspan.cache.paged import PagedCache
from megaspan.cache.transient import TransientCache
from megaspan.engine.plan import Plan
from megaspan.engine.sampler import Sampled, Sampler
from megaspan.engine.slots import Slots
from megaspan.model.batch import Batch
from megaspan.model.transformer import Transformer


@dataclass
class Step:
    """A plan turned into tensors. rows: which of the batch's last hidden states are drawn from, for `slots`;
    drawn: how many tokens each of these has drawn before. masks: grammar masks, or None.
    """

    batch: Batch
    rows: Tensor
    slots: np.ndarray
    drawn: np.ndarray
    masks: Tensor | None


class Runner:
    """Carries out one step at a time."""

    def __init__(self, model: Transformer, cache: PagedCache, sampler: Sampler):
        self.model, self.cache, self.sampler = model, cache, sampler
        self.device = model.lm_head.weight.device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megaspan-forward")

    def build(self, plan: Plan, slots: Slots) -> Step:
        """The plan as a batch: decoding requests first, then the chunks."""
        decoding = plan.decoding
        pieces = [slots.last[decoding]]
        lengths, past = [1] * len(decoding), slots.cached[decoding].tolist()
        rows, drawing = list(range(len(decoding))), decoding.tolist()
        table_rows, end = drawing.copy(), len(decoding)
        for request, count in plan.chunks:
            pieces.append(request.ids(request.computed, request.computed + count))
            lengths.append(count)
            past.append(request.computed)
            table_rows.append(request.slot)
            end += count
            if request.remaining == count:
                rows.append(end - 1)
                drawing.append(request.slot)
        token_ids = torch.from_numpy(np.concatenate(pieces, dtype=np.int64)).to(self.device)
        batch = Batch(token_ids, tuple(lengths), tuple(past), slots=tuple(table_rows))
        drawn_slots = np.array(drawing, dtype=np.int64)
        rows = torch.tensor(rows, dtype=torch.long).to(self.device)
        return Step(batch, rows, drawn_slots, slots.drawn[drawn_slots], self._masks(drawn_slots, slots))

    def _masks(self, drawn: np.ndarray, slots: Slots) -> Tensor | None:
        """Grammar masks int32 [S, ceil(V / 32)] of the slots that are drawn for, if any has a grammar."""
        rows = [(row, slots.requests[drawn[row]]) for row in np.flatnonzero(slots.special[drawn]).tolist()]
        bound = [(row, request.grammar) for row, request in rows if request is not None and request.grammar]
        if not bound:
            return None
        masks = torch.full((len(drawn), -(-self.sampler.vocab_size // 32)), -1, dtype=torch.int32)
        for row, grammar in bound:
            grammar.mask(masks[row])
        return masks

    def start(self, step: Step) -> "Future[tuple[Sampled | None, float]]":
        """Begin the step; the future gives what was drawn (None: nothing was to be) and the seconds taken."""
        return self._thread.submit(self._timed, self._run, step)

    def warm_up(self) -> None:
        """Run the model once on a few tokens and once on one, and forget it."""
        self._thread.submit(self._try_out).result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def _run(self, step: Step) -> Sampled | None:
        hidden = self.model(step.batch, self.cache)
        if not len(step.slots):
            return None
        logits = self.model.unembed(hidden[step.rows])
        return self.sampler.sample(logits, step.slots, step.drawn, step.masks)

    @torch.inference_mode()
    def _try_out(self) -> None:
        for length in (9, 1):
            tokens = torch.zeros(length, dtype=torch.long, device=self.device)
            hidden = self.model(Batch(tokens, (length,), (0,)), TransientCache())
            self.model.unembed(hidden[-1:])

    @staticmethod
    def _timed(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        result = run(*arguments)
        return result, time.perf_counter() - began
