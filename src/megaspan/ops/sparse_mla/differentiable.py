"""Sparse latent attention on a GPU with gradients."""

from typing import Any

import torch
from torch import Tensor

from megaspan.ops.sparse_mla.gpu import sparse_mla_gpu
from megaspan.ops.sparse_mla.gpu_backward import sparse_mla_backward


def sparse_mla_differentiable(
    query: Tensor, rows: Tensor, selected: Tensor, value_width: int, scale: float, budget_bytes: int
) -> Tensor:
    """As `sparse_mla`, for operands that `gpu_backward.supports_backward` accepts. Differentiable once."""
    return _Attention.apply(query, rows, selected, value_width, scale, budget_bytes)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        rows: Tensor,
        selected: Tensor,
        value_width: int,
        scale: float,
        budget_bytes: int,
    ) -> Tensor:
        output, lse = sparse_mla_gpu(query, rows, selected, value_width, scale)
        ctx.save_for_backward(query, rows, selected, output, lse)
        ctx.value_width, ctx.scale, ctx.budget_bytes = value_width, scale, budget_bytes
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, rows, selected, output, lse = ctx.saved_tensors
        results = output, lse, grad_output
        operands = query, rows, selected, ctx.value_width, ctx.scale
        grad_query, grad_rows = sparse_mla_backward(*operands, *results, ctx.budget_bytes)
        return grad_query, grad_rows, None, None, None, None
