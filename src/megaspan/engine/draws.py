"""Draw one token per row so that a row's draw depends on nothing but the row, bit for bit.

Two things make a draw depend on its batch: a generator whose state others advance, and sums of floats, whose
order follows the shape of the batch. Here a uniform is a hash of the request's seed and the token's index,
and probabilities are whole numbers, whose sums are exact in any order, on any device.

Shapes: R rows, V vocabulary, C candidates.
"""

import numpy as np
import torch
from torch import Tensor

from megaspan.ops.logits import FRACTION_BITS

ID_BITS = 22  # a weight and an id fit in one int64, and so does the sum of 2**22 weights
LARGEST_VOCABULARY = 1 << ID_BITS
FIRST_CANDIDATES = 256  # a nucleus is seldom wider; the whole vocabulary is sorted only where it is


def uniforms(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """float64 [R] in [0, 1): the `steps`-th number of each seed's own SplitMix64 stream (Steele et al. 2014).

    seeds: uint64 [R]. steps: integers [R], the index of the token in its request.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds.astype(np.uint64) + golden) + (steps.astype(np.uint64) + np.uint64(1)) * golden
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def fixed_weights(below_best: Tensor) -> Tensor:
    """int64 [R, V]: exp(below_best) in multiples of 2**-40, rounded down. below_best: floats [R, V], <= 0."""
    return below_best.exp().mul_(2.0**FRACTION_BITS).long()


def draw(weights_RV: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Ids int64 [R], each drawn in proportion to its weight.

    min_p, uniform: float64 [R]. Tokens below the share `min_p` of the best one are left out.
    """
    weights_RV = weights_RV.masked_fill(weights_RV < _floor(min_p), 0)
    return _pick(weights_RV.cumsum(-1), uniform)


def draw_ranked(
    weights_RV: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    candidates: int = FIRST_CANDIDATES,
) -> Tensor:
    """As `draw`, from the `top_k` best of each row, then from the fewest of these that reach `top_p`.

    top_k: int64 [R], V where all count. top_p: float64 [R]. Among equals the lowest id is the best.
    candidates: how many of each row's best to look at first; it changes the time, not the result.
    """
    reverse_ids = torch.arange(weights_RV.shape[1] - 1, -1, -1, device=weights_RV.device)
    keys_RV = (weights_RV << ID_BITS) + reverse_ids  # no two are equal: any algorithm ranks them alike
    totals = weights_RV.sum(-1)
    candidates = min(candidates, weights_RV.shape[1])
    ids, covered = _draw_among(keys_RV, candidates, totals, top_k, top_p, min_p, uniform)
    wide = (~covered).nonzero()[:, 0]
    if len(wide):
        arguments = [value[wide] for value in (totals, top_k, top_p, min_p, uniform)]
        ids[wide], _ = _draw_among(keys_RV[wide], weights_RV.shape[1], *arguments)
    return ids


def _draw_among(
    keys_RV: Tensor,
    candidates: int,
    totals: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Ids [R] drawn from each row's best `candidates`, and bool [R]: whether these were enough."""
    keys_RC = keys_RV.topk(candidates, dim=-1).values
    weights_RC = keys_RC >> ID_BITS
    sums_RC = weights_RC.cumsum(-1)
    last = top_k.clamp(max=candidates)[:, None] - 1
    totals = torch.where(top_k <= candidates, sums_RC.gather(1, last)[:, 0], totals)
    reach = top_p * totals.double()
    ranks = torch.arange(candidates, device=keys_RV.device)
    before_RC = (sums_RC - weights_RC).double()
    kept_RC = (ranks < top_k[:, None]) & (before_RC < reach[:, None]) & (weights_RC >= _floor(min_p))
    chosen = _pick((weights_RC * kept_RC).cumsum(-1), uniform)
    reverse_ids = keys_RC.gather(1, chosen[:, None])[:, 0] & (LARGEST_VOCABULARY - 1)
    width = keys_RV.shape[1]
    # The total that top_p is a share of is known for the best `top_k`, seen whole, or for all of a row.
    reached = (top_k >= width) & (sums_RC[:, -1].double() >= reach)
    return width - 1 - reverse_ids, (top_k <= candidates) | reached | (candidates == width)


def _floor(min_p: Tensor) -> Tensor:
    """int64 [R, 1]: the least weight that counts."""
    return (min_p * 2.0**FRACTION_BITS).ceil().long()[:, None]


def _pick(sums: Tensor, uniform: Tensor) -> Tensor:
    """int64 [R]: the place in each row where the running sum first exceeds `uniform` of the row's total."""
    totals = sums[:, -1]
    target = (uniform * totals.double()).long().minimum(totals - 1)  # the product may round up to the total
    place = torch.searchsorted(sums, target[:, None], right=True)[:, 0]
    return place.clamp(max=sums.shape[1] - 1)  # a row of nothing, which is reported as failed
