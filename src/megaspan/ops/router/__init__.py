"""Routing: which experts a token goes to, and with what weights (DeepSeek-V3, section 2.1.2)."""

import torch
from torch import Tensor

from megaspan.ops.router import native
from megaspan.ops.router.reference import route_reference

__all__ = ["route", "route_reference"]


def route(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    topk: int,
    normalise: bool,
    scaling: float,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest sigmoid(hidden . weight) + bias; weigh them by the sigmoid.

    hidden: [T, D], fp32 or bf16; weight: [E, D]; bias: [E]. All is computed in fp32. The compiled versions
    give ties to the lowest expert.
    normalise: the weights of a token add up to 1 before they are multiplied by `scaling`.
    invariant: a token's bits do not depend on the others, as in `linear`.
    Returns expert ids [T, k] int64, best first, and their weights [T, k] fp32.
    """
    if native.can_take(hidden, weight):
        return native.route_native(hidden, weight, bias, topk, normalise, scaling)
    if hidden.is_cuda:
        from megaspan.ops.router import gpu

        if gpu.can_take(hidden, weight):
            return gpu.route_gpu(hidden, weight, bias, topk, normalise, scaling)
    tokens = hidden.split(1) if invariant and len(hidden) else (hidden,)
    routed = [route_reference(token, weight, bias, topk, normalise, scaling) for token in tokens]
    return torch.cat([ids for ids, _ in routed]), torch.cat([weights for _, weights in routed])
