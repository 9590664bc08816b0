"""Select the rows each token attends to: the exact top-k of the lightning indexer (DeepSeek-V3.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megaspan.ops.index_topk.blocked import index_topk_blocked
from megaspan.ops.index_topk.native import index_topk_native, supports
from megaspan.ops.index_topk.reference import index_topk_reference
from megaspan.ops.quant import require_pages
from megaspan.ops.rows import RowTable

__all__ = ["index_topk", "index_topk_blocked", "index_topk_native", "index_topk_reference"]


def index_topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    topk: int,
    budget_bytes: int = 256 << 20,
    *,
    query_lengths: Sequence[int] | None = None,
    longest: int | None = None,
) -> Tensor:
    """Select for each token the `topk` best positions of its sequence, exactly.

    The score of token t for position p < visible[t] is
    `sum_j weights[t, j] * relu(query[t, j] . key)`, accumulated in fp32. A tie at the cut goes to the
    lowest position; NaN counts as -inf. The choice has no gradient.

    Args:
        query: [T, H, D] fp32 or bf16.
        weights: [T, H] fp32, one weight for each head.
        keys: [N, D], dtype of the query, the rows that the table points into. Or uint8 [N, D + 4], FP8 rows
            of `quant.store_index_rows` in pages of `table.page_size`, where all starts of the table must be
            multiples of it; query and weights are then those of `quant.quantize_index_queries`.
        table: where the rows of each of S sequences are.
        sequence_ids: [T] int64 in 0..S-1.
        visible: [T] int64, how many of its sequence's positions the token may see.
        topk: how many to select.
        budget_bytes: bound on working memory beyond arguments and result.
        query_lengths, longest: what the host knows of `sequence_ids` (how many tokens in a row each sequence
            has) and of `visible` (a bound), so that a GPU need not be asked.

    Returns:
        [T, topk] int32 positions, ascending, padded at the end with -1 where fewer are visible.

    Raises:
        ValueError: shapes or dtypes disagree, or the budget is below the smallest step.
        IndexError: a sequence, a length or a row is out of range.
    """
    _check(query, weights, keys, sequence_ids, visible)
    if keys.dtype == torch.uint8:
        require_pages(keys, table.page_size)
    arguments = (query, weights, keys, table, sequence_ids, visible, topk, budget_bytes)
    if query.is_cuda:
        from megaspan.ops.index_topk import gpu

        if gpu.supports(query, keys):
            return gpu.index_topk_gpu(*arguments, query_lengths, longest)
    return index_topk_native(*arguments) if supports(query, keys) else index_topk_blocked(*arguments)


def _check(query: Tensor, weights: Tensor, keys: Tensor, sequence_ids: Tensor, visible: Tensor) -> None:
    fp8 = keys.dtype == torch.uint8
    if query.dim() != 3 or keys.dim() != 2 or query.shape[2] + (4 if fp8 else 0) != keys.shape[1]:
        raise ValueError(f"query [T, H, D] {list(query.shape)} and keys [N, D] {list(keys.shape)} disagree")
    if query.dtype != (torch.bfloat16 if fp8 else keys.dtype):
        raise ValueError(f"query is {query.dtype} but keys are {keys.dtype}, which take another")
    if weights.shape != query.shape[:2]:
        raise ValueError(f"weights {list(weights.shape)} must be [T, H] = {list(query.shape[:2])}")
    if not sequence_ids.shape == visible.shape == query.shape[:1]:
        raise ValueError("sequence_ids and visible must be [T], one for each token of the query")
