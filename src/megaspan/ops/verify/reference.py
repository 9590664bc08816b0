"""Rejection sampling in plain PyTorch, a sequence at a time.

A probability counts as a whole number of 2**-52, rounded down: exact from 2**-29 up. Sums are exact in any
order, so every device draws the same token.
"""

from itertools import pairwise

import torch
from torch import Tensor

ONE = 1 << 52  # sums of a row stay below 2**53, where float64 is exact


def verify_reference(
    target: Tensor,
    draft: Tensor | None,
    draft_tokens: Tensor,
    draft_starts: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `verify`."""
    accepted, next_tokens = [], []
    tokens, vocabulary = draft_tokens.tolist(), target.shape[1]
    for sequence, (first, stop) in enumerate(pairwise(draft_starts.tolist())):
        at = first  # the draft that is looked at
        while at < stop and 0 <= tokens[at] < vocabulary:
            p = float(target[at + sequence, tokens[at]])
            q = float(draft[at, tokens[at]]) if draft is not None else 1.0
            if not float(accept_uniforms[at]) * q < p:
                break
            at += 1
        plain_V = _whole(target[at + sequence])
        weights_V = plain_V
        if at < stop and 0 <= tokens[at] < vocabulary:  # rejected
            if draft is not None:
                weights_V = (plain_V - _whole(draft[at])).clamp(min=0)
            else:
                weights_V = plain_V.clone()
                weights_V[tokens[at]] = 0
            if not weights_V.any():  # p is q but for rounding
                weights_V = plain_V
        accepted.append(at - first)
        next_tokens.append(_draw(weights_V, float(draw_uniforms[at + sequence])))
    return _results(accepted, next_tokens, target.device)


def match_samples_reference(
    samples: Tensor, draft_tokens: Tensor, draft_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """See `match_samples`."""
    drawn, drafts, accepted, next_tokens = samples.tolist(), draft_tokens.tolist(), [], []
    for sequence, (first, stop) in enumerate(pairwise(draft_starts.tolist())):
        at = first
        while at < stop and drafts[at] == drawn[at + sequence]:
            at += 1
        accepted.append(at - first)
        next_tokens.append(drawn[at + sequence])
    return _results(accepted, next_tokens, samples.device)


def _results(accepted: list[int], next_tokens: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    counts = torch.tensor(accepted, dtype=torch.int32, device=device)
    return counts, torch.tensor(next_tokens, dtype=torch.int64, device=device)


def _whole(row_V: Tensor) -> Tensor:
    """int64 [V]: probabilities in units of 2**-52; 0 for NaN."""
    return (row_V * float(ONE)).where(row_V > 0, 0).long()


def _draw(weights_V: Tensor, uniform: float) -> int:
    """The id at which the running sum first exceeds `uniform` of the total; -1 where that is 0."""
    sums_V = weights_V.cumsum(0)
    total = int(sums_V[-1]) if len(sums_V) else 0
    wanted = min(int(uniform * total), total - 1)  # a uniform may have been rounded to 1
    return int(torch.searchsorted(sums_V, wanted, right=True)) if total else -1
