"""Attention of latent queries over the few cached rows that the indexer selected."""

import torch
from torch import Tensor

from megaspan.ops.sparse_mla import gathered, native
from megaspan.ops.sparse_mla.gathered import sparse_mla_gathered
from megaspan.ops.sparse_mla.reference import sparse_mla_reference
from megaspan.ops.sparse_mla.visible import visible_mla

__all__ = ["sparse_mla", "sparse_mla_gathered", "sparse_mla_reference", "visible_mla"]


def sparse_mla(
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    value_width: int,
    scale: float,
    budget_bytes: int = gathered.TILE_BYTES,
    invariant: bool = False,
) -> Tensor:
    """Attend from T tokens to their selected rows: softmax(scale * query . row) over the first columns.

    query:     [T, H, W], absorbed queries: latent part, then rotary part.
    rows:      [N, W], the cache, in the dtype of `query`; the first `value_width` columns of a row are its
               value. Or uint8, FP8 rows of `ops.quant.encode_latent_rows` whose latent rank is `value_width`.
    selected:  [T, K] int64 row numbers; -1 marks an empty slot. A token's first slot is never empty.
    Returns [T, H, value_width] in the dtype of `query` (fp32 or bf16); sums are in fp32. Rows that no
    token selected are never read. Temporary memory stays within `budget_bytes`. Differentiable in `query`
    and `rows`, but not through FP8 rows: ValueError.

    invariant: on a GPU, give a token the same bits whatever tokens share the call, and however many empty
        slots follow its rows.
    """
    differentiated = torch.is_grad_enabled() and (query.requires_grad or rows.requires_grad)
    if query.is_cuda and not differentiated:
        from megaspan.ops.sparse_mla import gpu

        if gpu.supports(query, rows, value_width):
            splits = gpu.INVARIANT_SPLITS if invariant else None
            return gpu.sparse_mla_gpu(query, rows, selected, value_width, scale, splits)[0]
    if query.is_cuda and differentiated:
        from megaspan.ops.sparse_mla import differentiable, gpu_backward

        if gpu_backward.supports_backward(query, rows, value_width):
            operands = query, rows, selected, value_width, scale
            return differentiable.sparse_mla_differentiable(*operands, budget_bytes)
    if native.supports(query, rows):
        return native.sparse_mla_native(query, rows, selected, value_width, scale)
    return sparse_mla_gathered(query, rows, selected, value_width, scale, budget_bytes)
