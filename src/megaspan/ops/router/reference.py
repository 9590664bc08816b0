"""Routing in PyTorch, differentiable in the hidden states and the router's weight."""

import torch.nn.functional as F
from torch import Tensor


def route_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor, topk: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `route`; the choice has no gradient, the weights have."""
    scores = F.linear(hidden.float(), weight.float()).sigmoid()
    expert_ids = (scores.detach() + bias).topk(topk, dim=-1).indices
    weights = scores.gather(-1, expert_ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return expert_ids, weights * scaling
