"""Routed experts, written as plainly as they can be."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from megaspan.ops.quant import decode_latent_rows, dequantize_blocks, encode_latent_rows


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


def moe_fp8_reference(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
) -> Tensor:
    """As `moe_reference`, with weights in FP8 and states rounded to it before each product; see `moe_fp8`."""
    tokens = []
    for hidden_1D, ids, weights in zip(hidden.split(1), expert_ids.tolist(), expert_weights, strict=True):
        total_1D = torch.zeros_like(hidden_1D, dtype=torch.float32)
        for expert, weight in zip(ids, weights, strict=True):
            gate_up_proj = dequantize_blocks(gate_up[expert], gate_up_scales[expert])
            gate, up = (_rounded(hidden_1D) @ gate_up_proj.T).chunk(2, 1)
            down_proj = dequantize_blocks(down[expert], down_scales[expert])
            total_1D = total_1D + weight * (_rounded(silu(gate) * up) @ down_proj.T)
        tokens.append(total_1D)
    return torch.cat(tokens).to(hidden.dtype) if tokens else torch.empty_like(hidden)


def _rounded(states: Tensor) -> Tensor:
    """States [T, D] as e4m3 holds them with a scale for each 128 numbers: in fp32, rounded as latent rows."""
    width = states.shape[1]
    return decode_latent_rows(encode_latent_rows(states, width), width, 0)
