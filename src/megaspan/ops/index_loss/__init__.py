"""How far an indexer is from the attention that it should foresee (DeepSeek-V3.2, section 2.1)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megaspan.ops.budget import working_memory
from megaspan.ops.index_loss.reference import index_loss_reference
from megaspan.ops.index_loss.tiled import index_loss_tiled

__all__ = ["index_loss", "index_loss_reference", "index_loss_tiled"]


def index_loss(
    index_query: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    seen: Tensor,
    budget_bytes: int | None = None,
) -> Tensor:
    """Sum over Q queries of KL(p ‖ softmax(I)) in nats, a scalar, over the rows that a query sees.

    index_query: [Q, J, D]. index_weights: [Q, J] fp32. index_keys: [N, D], in the dtype of the queries. The
        index score of a query for a row is I = Σ_j weight_j * ReLU(query_j · key).
    layers: for each layer that the indexer serves, absorbed queries [Q, H, W] and latent rows [N, W]. p is
        the mean over layers and heads of softmax(scale * query · row).
    seen: [Q] int64, a query sees rows 0 to seen - 1; or [Q, K] int64, the rows of its selection, -1 where a
        slot is empty. A query that sees nothing adds 0.
    Differentiable once, in index_query, index_weights and index_keys. What has a number for every query and
    row stays within `budget_bytes` (default: `working_memory`), or what one query needs if that is more.
    """
    operands = index_query, index_weights, index_keys
    needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
    if budget_bytes is None:
        budget_bytes = working_memory(index_query.device)
    return _IndexLoss.apply(*operands, layers, scale, seen, budget_bytes, needed)  # pyright: ignore[reportReturnType]


class _IndexLoss(torch.autograd.Function):
    """The gradients are made along with the loss, while the target is at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        index_query: Tensor,
        index_weights: Tensor,
        index_keys: Tensor,
        layers: Sequence[tuple[Tensor, Tensor]],
        scale: float,
        seen: Tensor,
        budget_bytes: int,
        needed: bool,
    ) -> Tensor:
        version = index_loss_tiled
        if index_query.is_cuda:
            from megaspan.ops.index_loss import gpu

            if gpu.supports(index_query, index_keys, layers):
                version = gpu.index_loss_gpu
        operands = index_query, index_weights, index_keys, layers, scale, seen
        loss, gradients = version(*operands, budget_bytes, needed)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = (gradient * grad_loss.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return *gradients, None, None, None, None, None
