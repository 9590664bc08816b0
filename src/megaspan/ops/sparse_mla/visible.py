"""Latent attention to every visible row, in the order of additions that a selection of them all has."""

import torch
from torch import Tensor

from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import native
from megaspan.ops.sparse_mla.gathered import sparse_mla_gathered

SLOT_BYTES = 64  # of temporaries for one token and row, while the row's number is looked up


def visible_mla(
    query: Tensor,
    rows: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    value_width: int,
    scale: float,
    budget_bytes: int,
) -> Tensor:
    """As `sparse_mla` where each token has selected the first `visible` positions of its sequence, in order.

    sequence_ids, visible: [T] int64, visible at least 1. Returns [T, H, value_width].

    The row numbers exist for a tile of tokens at a time, so that temporary memory stays within
    `budget_bytes`, or what one token needs if that is more. A token's bits depend on neither its tile nor
    its company: the compiled version stops where a token's rows end, on a GPU its rows are split in one way,
    and the other version gets each token alone.
    """
    differentiated = torch.is_grad_enabled() and (query.requires_grad or rows.requires_grad)
    if query.is_cuda and not differentiated:
        from megaspan.ops.sparse_mla import gpu

        if gpu.supports(query, rows, value_width):
            return gpu.visible_mla_gpu(
                query, rows, table, sequence_ids, visible, value_width, scale, budget_bytes
            )
    compiled = native.supports(query, rows)
    tokens = tokens_per_tile(int(visible.max()), budget_bytes) if compiled and len(query) else 1
    output = query.new_empty(*query.shape[:2], value_width)
    for start in range(0, len(query), tokens):
        tile = slice(start, start + tokens)
        positions_L = torch.arange(int(visible[tile].max()), device=query.device)
        positions_RL = positions_L.where(positions_L < visible[tile, None], -1)
        numbers_RL = table.rows(sequence_ids[tile], positions_RL)
        if compiled:
            output[tile] = native.sparse_mla_native(query[tile], rows, numbers_RL, value_width, scale)
        else:  # in fresh memory: kernels choose by alignment as well as by shape
            alone = query[tile].clone()
            output[tile] = sparse_mla_gathered(alone, rows, numbers_RL, value_width, scale, budget_bytes)
    return output


def tokens_per_tile(length: int, budget_bytes: int) -> int:
    """How many tokens' row numbers fit in the budget where the longest sees `length` rows."""
    return max(1, budget_bytes // (length * SLOT_BYTES))
