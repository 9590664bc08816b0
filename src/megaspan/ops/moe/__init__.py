"""SwiGLU layers: a mixture of experts, each token through the k that its router chose, and the plain one.

`invariant` asks for results of a token that have the same bits whatever the other tokens are; see `linear`.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from megaspan.ops.linear import each_token
from megaspan.ops.moe import native
from megaspan.ops.moe.grouped import moe_grouped
from megaspan.ops.moe.reference import moe_reference

__all__ = ["moe", "moe_grouped", "moe_reference", "swiglu"]


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
    expert_weights: [T, k] fp32. For many tokens they weigh the inner states, in the dtype of `hidden`.
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
    if not invariant or not len(hidden):
        return moe_grouped(*operands)
    routing = zip(hidden.split(1), expert_ids.split(1), expert_weights.split(1), strict=True)
    return torch.cat([moe_grouped(*token, *projections) for token in routing])


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
    return each_token(_swiglu, hidden, *projections) if invariant else _swiglu(hidden, *projections)


def _swiglu(hidden: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
    return linear(silu(linear(hidden, gate_proj)) * linear(hidden, up_proj), down_proj)


def _tracked(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
