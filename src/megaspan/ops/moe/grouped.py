"""Routed experts in PyTorch: bring the tokens of each expert together, so that each is one matrix product."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu


def moe_grouped(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """As `moe`; differentiable in `hidden`, `expert_weights` and both projections.

    The order of every sum is fixed: a token's k results return to its own slots and are added there.
    """
    slots = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(len(gate_up_proj), dtype=torch.int64, device=hidden.device)
    counts.scatter_add_(0, expert_ids.flatten(), torch.ones_like(order))
    product = _product(counts, hidden, gate_up_proj, down_proj)
    gate, up = product(_Dispatch.apply(hidden, order, inverse, slots), gate_up_proj).chunk(2, -1)
    # Weighing the narrow inner states instead of the outputs moves fewer bytes; down_proj is linear.
    weights = expert_weights.flatten().index_select(0, order)[:, None].to(hidden.dtype)
    output = product(silu(gate) * up * weights, down_proj)
    return _Combine.apply(output, order, inverse, slots)  # pyright: ignore[reportReturnType]


class _Dispatch(torch.autograd.Function):
    """[T, D] → [T k, D], each token once for each of its experts, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.slots = slots
        return hidden.index_select(0, order // slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        order, inverse = ctx.saved_tensors
        return _Combine.apply(gradient, order, inverse, ctx.slots), None, None, None


class _Combine(torch.autograd.Function):
    """[T k, D] sorted by expert → [T, D], the sum over each token's experts: the transpose of _Dispatch."""

    @staticmethod
    def forward(ctx: Any, sorted_states: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.slots = slots
        return sorted_states.index_select(0, inverse).unflatten(0, (-1, slots)).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        order, inverse = ctx.saved_tensors
        return _Dispatch.apply(gradient, order, inverse, ctx.slots), None, None, None


def _product(counts: Tensor, *operands: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Multiply each expert's stretch of tokens by the transpose of its own matrix."""
    if _has_grouped_product(*operands):
        ends = counts.cumsum(0).to(torch.int32)
        return lambda states, matrices: grouped_mm(states, matrices.mT, offs=ends)
    lengths = counts.tolist()
    return lambda states, matrices: torch.cat(
        [part @ matrix.T for part, matrix in zip(states.split(lengths), matrices, strict=True)]
    )


def _has_grouped_product(*operands: Tensor) -> bool:
    """The CUDA kernel takes bf16 operands whose rows start on multiples of 16 bytes."""
    return (
        all(operand.is_cuda and operand.dtype == torch.bfloat16 for operand in operands)
        and all(operand.shape[-1] % 8 == 0 for operand in operands)
        and torch.cuda.get_device_capability(operands[0].device) >= (9, 0)
    )
