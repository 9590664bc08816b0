"""Draws the next token of every request of a step, each as if it were alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megaspan.engine.draws import (
    FIRST_CANDIDATES,
    LARGEST_VOCABULARY,
    draw,
    draw_ranked,
    fixed_weights,
    uniforms,
)
from megaspan.engine.sampling import SamplingParams
from megaspan.ops.logits import logit_summary

Alternatives = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """What one step drew, row by row of its logits.

    token_ids: int64 [S], -1 where the row failed. logprobs: float32 [S], the natural log-probability of the
    token in the model's own distribution, NaN where the row failed. top: for each row that asked, its
    alternatives (id, log-probability), best first; None for the others. failed: the rows whose logits are not
    finite or for which nothing was left to draw. exhausted: the latter, where the logits were sound.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top: list[Alternatives | None]
    failed: list[int]
    exhausted: list[int]


class Sampler:
    """Keeps what each slot's request asked for; `sample` then takes no work per request in Python.

    vocab_size: the tokenizer's; ids from there on are never drawn, where the model's vocabulary is padded.
    slots: how many requests may be admitted at a time. device: where the logits are.

    Counts for penalties (5 bytes per slot and id) are allocated when the first request asks for them.
    """

    def __init__(self, vocab_size: int, slots: int, device: str | torch.device = "cpu") -> None:
        if not 1 <= vocab_size <= LARGEST_VOCABULARY:
            raise ValueError(f"vocab_size is {vocab_size}: at most {LARGEST_VOCABULARY} can be sampled from")
        self.vocab_size, self.slots, self.device = vocab_size, slots, torch.device(device)
        self._greedy = np.ones(slots, dtype=bool)
        self._plain = np.ones(slots, dtype=bool)  # greedy, with nothing added, counted or reported
        self._constrained = np.zeros(slots, dtype=bool)
        self._penalized = np.zeros(slots, dtype=bool)
        self._biased = np.zeros(slots, dtype=bool)
        self._logprobs = np.zeros(slots, dtype=np.int64)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._ranked = np.zeros(slots, dtype=bool)
        self._draw_params = np.ones((4, slots))  # temperature, top_k, top_p, min_p
        self._penalties = np.zeros((3, slots))  # repetition, frequency, presence
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._banned: dict[int, tuple[int, np.ndarray]] = {}  # until which step, which ids
        self._in_prompt: Tensor | None = None  # bool [slots, V]
        self._counts: Tensor | None = None  # int32 [slots, V]

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Take up a request.

        prompt, generated: its token ids so far, which penalties count; `generated` is what it had drawn
        before it was preempted. seed: any integer, taken modulo 2**64. stop_ids: the ids, besides the
        request's `stop_token_ids`, that must not come before `min_tokens`.
        """
        self.release(slot)
        self._greedy[slot] = params.greedy
        self._constrained[slot] = params.grammar is not None
        self._penalized[slot] = params.penalized
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._seeds[slot] = seed % (1 << 64)
        top_k = min(params.top_k or self.vocab_size, self.vocab_size)
        self._ranked[slot] = top_k < self.vocab_size or params.top_p < 1
        self._draw_params[:, slot] = params.temperature, top_k, params.top_p, params.min_p
        self._penalties[:, slot] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        known = [
            (number, bias) for number, bias in dict(params.logit_bias).items() if number < self.vocab_size
        ]
        if known:
            ids, values = zip(*known, strict=True)
            self._biases[slot] = np.array(ids, dtype=np.int64), np.array(values)
        banned = {number for number in (*stop_ids, *params.stop_token_ids) if number < self.vocab_size}
        if params.min_tokens and banned:
            self._banned[slot] = params.min_tokens, np.array(sorted(banned), dtype=np.int64)
        self._biased[slot] = slot in self._biases or slot in self._banned
        special = (
            params.penalized or self._biased[slot] or self._constrained[slot] or params.logprobs is not None
        )
        self._plain[slot] = params.greedy and not special
        if params.penalized:
            self._count(slot, prompt, generated)

    def release(self, slot: int) -> None:
        """Forget the slot's request; a slot without one is greedy."""
        self._greedy[slot] = self._plain[slot] = True
        for flags in (self._constrained, self._penalized, self._biased, self._ranked):
            flags[slot] = False
        self._logprobs[slot] = -1
        self._biases.pop(slot, None)
        self._banned.pop(slot, None)

    @torch.inference_mode()
    def sample(
        self,
        logits_SV: Tensor,
        slots: Sequence[int] | np.ndarray | Tensor,
        steps: Sequence[int] | np.ndarray | Tensor,
        masks: Tensor | None = None,
    ) -> Sampled:
        """Draw a token for each row.

        logits_SV: float32, on the sampler's device; its width may exceed `vocab_size`. slots: [S], each once.
        steps: [S], the index of the token among those that its request draws. masks: int32
        [S, ceil(vocab_size / 32)], a bit for each id, set where the grammar allows it; read only for requests
        with a grammar.
        """
        slots, steps = np.asarray(slots, dtype=np.int64), np.asarray(steps, dtype=np.int64)
        raw_SV = logits_SV[:, : self.vocab_size]
        summary = logit_summary(logits_SV, self.vocab_size)
        if self._plain[slots].all() and not summary.failed.any():  # nothing but the best tokens is asked for
            logprobs = (summary.best - summary.log_totals).astype(np.float32)
            return Sampled(summary.best_ids, logprobs, [None] * len(slots), [], [])
        ids, chosen, failed = summary.best_ids, summary.best, summary.failed
        exhausted = np.zeros(len(slots), dtype=bool)
        constrained = self._constrained[slots] if masks is not None else np.zeros(len(slots), dtype=bool)
        changed = constrained | self._penalized[slots] | self._biased[slots]
        rows = np.flatnonzero(changed | ~self._greedy[slots])
        if len(rows):
            at = self._to_device(rows)
            logits_RV = raw_SV[at].double()
            if changed[rows].any():
                self._bias(logits_RV, slots[rows], steps[rows])
                self._penalize(logits_RV, slots[rows])
                if masks is not None:
                    self._constrain(logits_RV, np.flatnonzero(constrained[rows]), masks, rows)
            nothing_left = logits_RV.amax(-1) == -torch.inf
            drawn = self._choose(logits_RV, slots[rows], steps[rows])
            drawn.clamp_(0, self.vocab_size - 1)  # where logits are not finite, an id may be anything
            values = raw_SV[at].gather(1, drawn[:, None])[:, 0].double()
            drawn, chosen[rows], nothing_left = (
                torch.stack([drawn.double(), values, nothing_left]).cpu().numpy()
            )
            ids[rows] = drawn.astype(np.int64)
            exhausted[rows] = nothing_left.astype(bool) & ~failed[rows]
            failed = failed | exhausted
        top = self._alternatives(raw_SV, summary.log_totals, slots, failed)
        with np.errstate(invalid="ignore"):  # of failed rows
            logprobs = np.where(failed, np.nan, chosen - summary.log_totals).astype(np.float32)
        token_ids = np.where(failed, -1, ids)
        self._record(slots, token_ids)
        rows_failed, rows_exhausted = np.flatnonzero(failed).tolist(), np.flatnonzero(exhausted).tolist()
        return Sampled(token_ids, logprobs, top, rows_failed, rows_exhausted)

    def _choose(self, logits_RV: Tensor, slots: np.ndarray, steps: np.ndarray) -> Tensor:
        """Ids [R] from adjusted float64 logits."""
        greedy, ranked = self._greedy[slots], self._ranked[slots]
        values = np.vstack([self._draw_params[:, slots], uniforms(self._seeds[slots], steps)])
        ids = torch.empty(len(slots), dtype=torch.int64, device=self.device)
        for chosen, pick in (
            (greedy, self._best),
            (~greedy & ranked, self._drawn_by_rank),
            (~greedy & ~ranked, self._drawn),
        ):
            if chosen.any():
                at = self._to_device(np.flatnonzero(chosen))
                ids[at] = pick(logits_RV[at], values[:, chosen])
        return ids

    def _best(self, logits_RV: Tensor, values: np.ndarray) -> Tensor:
        return logits_RV.argmax(-1)

    def _drawn(self, logits_RV: Tensor, values: np.ndarray) -> Tensor:
        temperature, _, _, min_p, uniform = self._to_device(values)
        return draw(_tempered(logits_RV, temperature), min_p, uniform)

    def _drawn_by_rank(self, logits_RV: Tensor, values: np.ndarray) -> Tensor:
        temperature, top_k, top_p, min_p, uniform = self._to_device(values)
        candidates = min(FIRST_CANDIDATES, int(values[1].max()))
        weights = _tempered(logits_RV, temperature)
        return draw_ranked(weights, top_k.long(), top_p, min_p, uniform, candidates)

    def _bias(self, logits_RV: Tensor, slots: np.ndarray, steps: np.ndarray) -> None:
        """Add each request's biases, and -inf to the ids that may not come yet."""
        entries = []
        for row in np.flatnonzero(self._biased[slots]):
            slot = int(slots[row])
            if slot in self._biases:
                entries.append((row, *self._biases[slot]))
            until, banned = self._banned.get(slot, (0, np.empty(0, dtype=np.int64)))
            if steps[row] < until:
                entries.append((row, banned, np.full(len(banned), -np.inf)))
        for row, ids, values in entries:
            logits_RV[int(row)].index_add_(0, self._to_device(ids), self._to_device(values))

    def _penalize(self, logits_RV: Tensor, slots: np.ndarray) -> None:
        rows = np.flatnonzero(self._penalized[slots])
        if not len(rows) or self._counts is None or self._in_prompt is None:
            return
        at, of = self._to_device(rows), self._to_device(slots[rows])
        repetition, frequency, presence = self._to_device(self._penalties[:, slots[rows]])[:, :, None]
        counts, logits = self._counts[of], logits_RV[at]
        used = counts > 0
        repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(used | self._in_prompt[of], repeated, logits)
        logits_RV[at] = logits - frequency * counts - presence * used

    def _constrain(self, logits_RV: Tensor, constrained: np.ndarray, masks: Tensor, rows: np.ndarray) -> None:
        """Leave only what the masks allow. constrained: rows of `logits_RV`, `rows` of the masks."""
        if not len(constrained):
            return
        words = masks[torch.from_numpy(rows[constrained]).to(masks.device)].to(self.device)
        bits = (words[:, :, None] >> torch.arange(32, device=self.device, dtype=torch.int32)) & 1
        allowed = bits.flatten(1)[:, : self.vocab_size].bool()
        at = self._to_device(constrained)
        logits_RV[at] = logits_RV[at].masked_fill(~allowed, -torch.inf)

    def _alternatives(
        self, raw_SV: Tensor, log_totals: np.ndarray, slots: np.ndarray, failed: np.ndarray
    ) -> list[Alternatives | None]:
        wanted = np.where(failed, -1, np.minimum(self._logprobs[slots], self.vocab_size))
        top: list[Alternatives | None] = [None] * len(slots)
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return top
        raw_RV = raw_SV[self._to_device(rows)]
        ids = _ranking(raw_RV, int(wanted.max()))
        values = raw_RV.gather(1, ids).double().cpu().numpy()
        logprobs = (values - log_totals[rows, None]).astype(np.float32)
        for row, ids_of, logprobs_of in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            top[row] = tuple(zip(ids_of, logprobs_of, strict=True))[: wanted[row]]
        return top

    def _count(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        if self._counts is None or self._in_prompt is None:
            shape = self.slots, self.vocab_size
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self._in_prompt[slot] = self._histogram(prompt) > 0
        self._counts[slot] = self._histogram(generated)

    def _histogram(self, token_ids: Sequence[int]) -> Tensor:
        ids = np.asarray(token_ids, dtype=np.int64)
        counts = np.bincount(ids[ids < self.vocab_size], minlength=self.vocab_size)
        return self._to_device(counts.astype(np.int32))

    def _record(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Count what was drawn, for the penalties of the next step."""
        rows = np.flatnonzero(self._penalized[slots] & (token_ids >= 0))
        if len(rows) and self._counts is not None:
            self._counts[self._to_device(slots[rows]), self._to_device(token_ids[rows])] += 1

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _tempered(logits_RV: Tensor, temperature: Tensor) -> Tensor:
    """The weights of the logits divided by the temperatures [R], without a quotient that overflows."""
    return fixed_weights((logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature[:, None])


def _ranking(logits_RV: Tensor, count: int) -> Tensor:
    """Ids int64 [R, count] of the greatest logits (float32), best first, the lowest id first among equals."""
    bits = (logits_RV + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    width = logits_RV.shape[1]
    keys = (ordered.long() << 32) + torch.arange(width - 1, -1, -1, device=logits_RV.device)
    return width - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
