"""The exact top-k of few queries on a GPU: store every score, then look only where the best can be.

With few queries it is the reading of the keys that takes time, and their scores are small beside them.
Where the context is long the scores' kernel keeps the maximum of each group of keys as well. The K-th
largest maximum is a threshold that at least K keys reach, and usually few more: these are listed, and the
best of the list are the answer. Where they do not fit the list, all the scores are read again, which is
slow but never wrong.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.index_topk.gpu_keys import KEYS, query_columns, tile_rows, tile_scores, values_and_scales
from megaspan.ops.index_topk.gpu_select import BLOCK, LISTED, list_kernel, select_kernel, tiles_of_maximum
from megaspan.ops.rows import RowTable

TILE = tl.constexpr(KEYS)
PROGRAMS = 132 * 4  # of 4 warps, that an H200 runs at once
LEAST_MAXIMA = 16384  # of a query; where there would be fewer, groups of 4 scores serve


@triton.jit
def _score_kernel(
    query_ptr,  # [T, H, D]
    weights_ptr,  # [T, H]
    keys_ptr,
    scales_ptr,
    starts_ptr,
    pages,
    groups_ptr,  # [G, 2]: first query and number of queries of each group
    groups,
    sequence_ids_ptr,
    visible_ptr,
    scores_ptr,  # [G, QUERIES, length] fp32
    length,
    maxima_ptr,  # [G, QUERIES, MAXIMA] fp32
    listed_ptr,  # [G, QUERIES]
    GROUPS_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    MAXIMA: tl.constexpr,
    TOPK: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Score all keys. Every program gets an equal share of all groups' tiles, whatever their lengths."""
    index = tl.arange(0, GROUPS_BLOCK)
    real = index < groups
    tokens = tl.load(groups_ptr + 2 * index, mask=real, other=0).to(tl.int64)
    counts = tl.load(groups_ptr + 2 * index + 1, mask=real, other=1)
    seen_most = tl.zeros([GROUPS_BLOCK], tl.int32)
    for member in tl.static_range(QUERIES):
        place = visible_ptr + tokens + tl.minimum(member, counts - 1)
        seen_most = tl.maximum(seen_most, tl.load(place, mask=real, other=0).to(tl.int32))
    if tl.program_id(0) == 0:
        for member in tl.static_range(QUERIES):
            tl.store(listed_ptr + index * QUERIES + member, 0, mask=real)
    # In shares of 4 tiles, so that no group of keys is parted.
    shares = tl.cdiv(tl.where(seen_most > TOPK, seen_most, 0), 4 * TILE)
    ends = tl.cumsum(shares)
    each = tl.cdiv(tl.max(ends), tl.num_programs(0))
    share = tl.program_id(0) * each
    stop = tl.minimum(share + each, tl.max(ends))
    member, head = query_columns(H, QUERIES)
    key = tl.expand_dims(tl.arange(0, TILE), 1)
    quarter = tl.expand_dims(tl.arange(0, TILE // 16), 1)
    column = tl.expand_dims(tl.arange(0, QUERIES), 0)
    while share < stop:
        # The first group that ends after this share.
        group = tl.sum((ends <= share).to(tl.int32))
        this = index == group
        first_query = tl.sum(tl.where(this, tokens, 0))
        count = tl.sum(tl.where(this, counts, 0))
        longest = tl.sum(tl.where(this, seen_most, 0))
        end = tl.sum(tl.where(this, ends, 0))
        begin = end - tl.sum(tl.where(this, shares, 0))
        sequence = tl.load(sequence_ids_ptr + first_query)
        row = (first_query + tl.minimum(member, count - 1)) * H + head
        query = tl.load(query_ptr + row[:, None] * D + tl.arange(0, D)[None, :])
        weights = tl.load(weights_ptr + row)
        if FP8:
            query = query.to(tl.float8e4nv)
        seen = tl.load(visible_ptr + first_query + column, mask=column < count, other=0).to(tl.int32)
        together = tiles_of_maximum(longest, MAXIMA)
        slot = (group * QUERIES + column).to(tl.int64)
        first = (share - begin) * 4
        last = tl.minimum((tl.minimum(stop, end) - begin) * 4, tl.cdiv(longest, TILE))
        highest = tl.full([TILE // 16, QUERIES], -float("inf"), tl.float32)
        rows = tile_rows(starts_ptr, sequence, first, longest, pages, PAGE, ASSEMBLY)
        for tile in tl.range(first, last, num_stages=STAGES):
            here = rows
            ahead = tl.minimum(tile + 1, last - 1)
            rows = tile_rows(starts_ptr, sequence, ahead, longest, pages, PAGE, ASSEMBLY)
            left = longest - tile * TILE
            scores = tile_scores(
                query, weights, keys_ptr, scales_ptr, here, tile, left, True, PAGE, D, FP8, QUERIES
            )
            scores = tl.where((tile * TILE + key < seen) & (scores == scores), scores, -float("inf"))
            tl.store(scores_ptr + slot * length + tile * TILE + key, scores)
            of_tile = tl.max(tl.reshape(scores, [TILE // 16, 16, QUERIES]), 1)
            highest = tl.where(tile % together == 0, of_tile, tl.maximum(highest, of_tile))
            tl.store(maxima_ptr + slot * MAXIMA + tile // together * (TILE // 16) + quarter, highest)
        share = tl.minimum(stop, end)


def index_topk_decode(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    groups: Tensor,
    members: int,
    sequence_ids: Tensor,
    visible: Tensor,
    selected: Tensor,
    longest: int,
    budget_bytes: int,
) -> None:
    """Write to selected [T, topk] int32 the rows of the groups [G, 2], each up to `members` queries in a row.

    keys: the cache's storage. longest: no query sees more. The other arguments
    are those of `index_topk`. Nothing waits for the GPU. Groups that do not fit the budget take turns.
    """
    heads, width = query.shape[1:]
    topk, members = selected.shape[1], 1 if members == 1 else 4
    length = -(-longest // KEYS) * KEYS
    maxima = max(LEAST_MAXIMA, triton.next_power_of_2(-(-length // KEYS)))
    group_bytes = members * (4 * length + 4 * maxima + 8 * LISTED.value + 4)
    together = min(len(groups), budget_bytes // group_bytes)
    if not together:
        raise ValueError(f"index_topk needs a budget of at least {group_bytes} bytes, not {budget_bytes}")

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(together * members, *shape, dtype=dtype, device=query.device)

    scores, highest = empty(length, dtype=torch.float32), empty(maxima, dtype=torch.float32)
    listed, entries = empty(dtype=torch.int32), empty(LISTED.value, dtype=torch.int64)
    cache = *values_and_scales(keys, table), table.starts, table.starts.shape[1]
    sizes = dict(QUERIES=members, TOPK=topk)
    for part in groups.split(together):
        slots = len(part) * members
        _score_kernel[(PROGRAMS,)](
            query,
            weights,
            *cache,
            part,
            len(part),
            sequence_ids,
            visible,
            scores,
            length,
            highest,
            listed,
            GROUPS_BLOCK=triton.next_power_of_2(len(part)),
            MAXIMA=maxima,
            H=heads,
            D=width,
            PAGE=0 if table.starts.shape[1] == 1 else table.page_size,
            FP8=keys.dtype == torch.uint8,
            STAGES=8 if members == 1 else 4,
            ASSEMBLY=query.is_cuda,
            num_warps=4,
            **sizes,
        )
        stored = part, visible, scores, length
        blocks = max(1, min(-(-length // BLOCK.value), 512 // slots))
        list_kernel[(slots, blocks)](*stored, highest, listed, entries, MAXIMA=maxima, num_warps=16, **sizes)
        block = triton.next_power_of_2(topk)
        select_kernel[(slots,)](*stored, listed, entries, selected, TOPK_BLOCK=block, num_warps=16, **sizes)
