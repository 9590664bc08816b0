"""Sparse latent attention in PyTorch: gather the rows of a tile of tokens, then attend to them.

Only one tile of gathered rows [tile, K, W] exists at a time. The backward pass gathers again instead of
keeping them, and sums the gradients of a row, which thousands of tokens may select, in fp32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaspan.ops.quant import decode_latent_rows

TILE_BYTES = 256 << 20


def sparse_mla_gathered(
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    value_width: int,
    scale: float,
    budget_bytes: int = TILE_BYTES,
) -> Tensor:
    """As `sparse_mla`; temporary memory stays within `budget_bytes`, or what one token needs if that is more.

    Differentiable once, in `query` and `rows`. The gradient of `rows`, [N, W] in fp32, is not counted.
    ValueError for gradients through FP8 rows.
    """
    if rows.dtype == torch.uint8 and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("gradients do not pass through FP8 rows: use fp32 or bf16 rows, or torch.no_grad()")
    return _Gathered.apply(query, rows, selected, value_width, scale, budget_bytes)  # pyright: ignore[reportReturnType]


def tokens_per_tile(query: Tensor, rows: Tensor, slots: int, budget_bytes: int) -> int:
    """How many tokens fit in the budget at once; `slots` is K."""
    heads, width = query.shape[1:]
    exact_bytes = _accumulator(query).itemsize
    row_bytes = rows.nbytes // max(1, len(rows))
    if rows.dtype == torch.uint8:  # decoding holds the bytes, the values in fp32 and the result
        row_bytes += width * 8
    slot_bytes = row_bytes + width * exact_bytes + 6 * heads * exact_bytes + 16
    return max(1, budget_bytes // (slots * slot_bytes))


class _Gathered(torch.autograd.Function):
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
        ctx.save_for_backward(query, rows, selected)
        ctx.value_width, ctx.scale, ctx.budget_bytes = value_width, scale, budget_bytes
        output = query.new_empty(*query.shape[:2], value_width)
        for tile in _tiles(query, rows, selected, budget_bytes):
            _, gathered_TKW, probability_THK = _attend(query[tile], rows, selected[tile], value_width, scale)
            output[tile] = probability_THK.to(query.dtype) @ gathered_TKW[..., :value_width]
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, rows, selected = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_rows = torch.zeros_like(rows, dtype=_accumulator(query)) if ctx.needs_input_grad[1] else None
        unseen = query.shape[-1] - ctx.value_width
        for tile in _tiles(query, rows, selected, ctx.budget_bytes):
            query_THW, grad_THW = query[tile], torch.nn.functional.pad(grad_output[tile], (0, unseen))
            numbers_TK, gathered_TKW, probability_THK = _attend(
                query_THW, rows, selected[tile], ctx.value_width, ctx.scale
            )
            grad_scores_THK = _product(grad_THW, gathered_TKW.mT)
            grad_scores_THK -= (grad_scores_THK * probability_THK).sum(-1, keepdim=True)
            grad_scores_THK = grad_scores_THK.mul_(probability_THK).mul_(ctx.scale).to(query.dtype)
            grad_query[tile] = grad_scores_THK @ gathered_TKW
            if grad_rows is not None:
                del gathered_TKW
                left_TKG = torch.cat([grad_scores_THK, probability_THK.to(query.dtype)], 1).mT
                grad_gathered_TKW = _product(left_TKG, torch.cat([query_THW, grad_THW], 1))
                grad_rows.index_add_(0, numbers_TK.flatten(), grad_gathered_TKW.flatten(0, 1))
        return grad_query, None if grad_rows is None else grad_rows.to(rows.dtype), None, None, None, None


def _tiles(query: Tensor, rows: Tensor, selected: Tensor, budget_bytes: int) -> Iterator[slice]:
    step = tokens_per_tile(query, rows, selected.shape[1], budget_bytes)
    return (slice(start, start + step) for start in range(0, len(query), step))


def _attend(
    query_THW: Tensor, rows: Tensor, selected_TK: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers [T, K], the gathered rows [T, K, W] and the probabilities [T, H, K] of a tile.

    An empty slot gathers the token's first row, which is known to be written, and gets probability 0.
    """
    empty_TK = selected_TK < 0
    numbers_TK = selected_TK.where(~empty_TK, selected_TK[:, :1])
    gathered = rows.index_select(0, numbers_TK.flatten())
    if rows.dtype == torch.uint8:
        rope_width = query_THW.shape[-1] - value_width
        gathered = decode_latent_rows(gathered, value_width, rope_width, query_THW.dtype)
    gathered_TKW = gathered.view(*numbers_TK.shape, -1).to(query_THW.dtype)
    scores_THK = _product(query_THW, gathered_TKW.mT).mul_(scale)
    scores_THK.masked_fill_(empty_TK[:, None], float("-inf"))
    return numbers_TK, gathered_TKW, scores_THK.softmax(-1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, summed and kept in at least fp32: scores rounded to bf16 would shift probabilities."""
    exact = _accumulator(left)
    if left.is_cuda and left.dtype != exact:
        return torch.bmm(left, right, out_dtype=exact)
    return left.to(exact) @ right.to(exact)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
