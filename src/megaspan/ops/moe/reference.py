"""Routed experts, written as plainly as they can be."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def moe_reference(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Each token's weighted sum of the outputs of its experts; see `moe`."""
    tokens = []
    for hidden_D, ids, weights in zip(hidden.float(), expert_ids.tolist(), expert_weights, strict=True):
        total_D = torch.zeros_like(hidden_D)
        for expert, weight in zip(ids, weights, strict=True):
            gate_I, up_I = (gate_up_proj[expert].float() @ hidden_D).chunk(2)
            total_D = total_D + weight * (down_proj[expert].float() @ (silu(gate_I) * up_I))
        tokens.append(total_D)
    return torch.stack(tokens).to(hidden.dtype) if tokens else torch.empty_like(hidden)
