"""SwiGLU layers: a mixture of experts, each token through the k that its router chose, and the plain one.

`invariant` asks for results of a token that have the same bits whatever the other tokens are; see `linear`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.ops.linear import each_token, gate_up, linear
from megaspan.ops.moe import native
from megaspan.ops.moe.grouped import moe_grouped
from megaspan.ops.moe.reference import moe_fp8_reference, moe_reference

__all__ = ["moe", "moe_fp8", "moe_fp8_reference", "moe_grouped", "moe_reference", "swiglu"]


def moe(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    invariant: bool = False,
) -> Tensor:
    """Sum of expert_weights * down(silu(gate(hidden)) * up(hidden)) over the k experts of each token.

    hidden:         [T, D], fp32 or bf16.
    expert_ids:     [T, k] int64.
    expert_weights: [T, k] fp32. PyTorch's version weighs the inner states, in the dtype of `hidden`.
    gate_up_proj:   [E, 2 I, D], the first I rows are the gate; down_proj: [E, D, I]. The dtype of `hidden`.
    Returns [T, D] in the dtype of `hidden`; the k outputs are added in fp32.
    """
    projections = gate_up_proj, down_proj
    operands = hidden, expert_ids, expert_weights, *projections
    few = native.supports(hidden, expert_ids.shape[1], len(down_proj))
    if (few or (invariant and native.can_take(hidden))) and not _tracked(
        hidden, expert_weights, *projections
    ):
        return native.moe_native(*operands)
    if hidden.is_cuda and not _tracked(hidden, expert_weights, *projections):
        from megaspan.ops.moe import gpu

        if gpu.can_take(hidden, *projections):
            return gpu.moe_gpu(*operands, invariant=invariant)
    if not invariant or not len(hidden):
        return moe_grouped(*operands)
    routing = zip(hidden.split(1), expert_ids.split(1), expert_weights.split(1), strict=True)
    return torch.cat([moe_grouped(*token, *projections) for token in routing])


def moe_fp8(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    *,
    invariant: bool = False,
) -> Tensor:
    """As `moe` with FP8 weights, without gradients: products of e4m3 numbers, added in fp32.

    As in DeepSeek-V3, section 3.3: the states are rounded to e4m3 before each of the two products, with a
    scale for each 128 numbers of a token, and the sum of 128 products is scaled, then added to the others.

    gate_up: [E, 2 I, D] e4m3, a scale for each block of 128 x 128: fp32 [E, ceil(2 I/128), ceil(D/128)].
    down: [E, D, I] e4m3, its scales [E, ceil(D/128), ceil(I/128)]. Scales multiply.
    Without a GPU that computes such products this is the reference, a loop over the tokens.
    """
    operands = hidden, expert_ids, expert_weights, gate_up, gate_up_scales, down, down_scales
    if hidden.is_cuda:
        from megaspan.ops.moe import gpu

        if gpu.can_take_fp8(hidden, gate_up, down):
            return gpu.moe_fp8_gpu(*operands, invariant=invariant)
    return moe_fp8_reference(*operands)


def swiglu(
    hidden: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor, *, invariant: bool = False
) -> Tensor:
    """down(silu(gate(hidden)) * up(hidden)), the layer that every token goes through.

    hidden: [T, D], fp32 or bf16; gate_proj, up_proj: [I, D]; down_proj: [D, I]. Returns [T, D].
    """
    projections = gate_proj, up_proj, down_proj
    takes = native.can_take(hidden) if invariant else native.supports(hidden, slots=1, experts=1)
    if takes and not _tracked(hidden, *projections):
        return native.swiglu_native(hidden, *projections)
    if hidden.is_cuda and not _tracked(hidden, *projections):
        if invariant:
            return linear(gate_up(hidden, gate_proj, up_proj, invariant=True), down_proj, invariant=True)
        from megaspan.ops.moe.gpu_activation import silu_and_multiply

        return linear(silu_and_multiply(linear(hidden, gate_proj), linear(hidden, up_proj)), down_proj)
    return each_token(_swiglu, hidden, *projections) if invariant else _swiglu(hidden, *projections)


def _swiglu(hidden: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(hidden, gate_proj)) * F.linear(hidden, up_proj), down_proj)


def _tracked(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
