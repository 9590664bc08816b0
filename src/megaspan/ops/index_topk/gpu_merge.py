"""What a prefill's phases end with: the best of a query's old best and its lists, and at last positions."""

import triton
import triton.language as tl

from megaspan.ops.index_topk.gpu_keys import KEYS, lows, ranks, score_of, with_bit

TILE = tl.constexpr(KEYS)
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def merge_kernel(
    best_ptr,  # [G, 4, TOPK] entries
    merged_ptr,  # [G, 4, TOPK], the best of `best` and the lists
    best_counts_ptr,  # [G, 4]
    entries_ptr,
    counts_ptr,
    threshold_ptr,
    threshold_low_ptr,
    overflow_ptr,  # [G, 4]
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    LISTS: tl.constexpr,  # splits * TILE
    LENGTH: tl.constexpr,
):
    """Keep the best TOPK of a query's old best and its lists; the worst of them is the new threshold."""
    slot = tl.program_id(0).to(tl.int64)
    best_ptr += slot * TOPK
    entries_ptr += slot * (LISTS * LENGTH)
    merged_ptr += slot * TOPK
    old_count = tl.load(best_counts_ptr + slot)
    column = tl.arange(0, TOPK_BLOCK)
    old_there = column < old_count
    lists = tl.arange(0, LISTS)
    counts = tl.load(counts_ptr + slot * LISTS + lists)
    if tl.max(counts) > LENGTH:
        tl.store(overflow_ptr + slot, 1)
    counts = tl.minimum(counts, LENGTH)
    entry = tl.expand_dims(tl.arange(0, LENGTH), 1)
    place = lists // TILE * (LENGTH * TILE) + lists % TILE + entry * TILE
    there = entry < counts
    total = old_count + tl.sum(counts)

    # Scores first and the rest only of those that are kept: registers are scarce.
    old_rank = ranks(best_ptr, column, old_there)
    rank = ranks(entries_ptr, place, there)
    cut = tl.zeros([], tl.uint32)  # the rank of the TOPK-th best, found bit by bit; no rank is 0
    if total >= TOPK:
        for bit in range(32):
            candidate = with_bit(cut, bit)
            above = tl.sum((old_rank >= candidate).to(tl.int32)) + tl.sum((rank >= candidate).to(tl.int32))
            cut = tl.where(above >= TOPK, candidate, cut)
    old_kept, kept = old_rank > cut, rank > cut
    better = tl.sum(old_kept.to(tl.int32)) + tl.sum(kept.to(tl.int32))
    old_equal, equal = old_there & (old_rank == cut), there & (rank == cut)
    old_low, low = lows(best_ptr, column, old_equal), lows(entries_ptr, place, equal)
    low_cut = tl.zeros([], tl.int32)  # among equals the lowest positions, which have the largest lows
    if better + tl.sum(old_equal.to(tl.int32)) + tl.sum(equal.to(tl.int32)) > TOPK:
        for bit in range(1, 32):
            candidate = low_cut | (1 << (31 - bit))
            above = tl.sum((old_low >= candidate).to(tl.int32)) + tl.sum((low >= candidate).to(tl.int32))
            low_cut = tl.where(above >= TOPK - better, candidate, low_cut)
    old_equal, equal = old_equal & (old_low >= low_cut), equal & (low >= low_cut)
    if total >= TOPK:
        worst = tl.min(tl.where(old_equal, old_low, LAST))
        tl.store(threshold_ptr + slot, score_of(cut))
        tl.store(threshold_low_ptr + slot, tl.minimum(worst, tl.min(tl.where(equal, low, LAST))))
    tl.store(best_counts_ptr + slot, tl.minimum(total, TOPK))

    old_kept = old_kept | old_equal
    to = tl.cumsum(old_kept.to(tl.int32)) - 1
    tl.store(merged_ptr + to, tl.load(best_ptr + column, mask=old_kept), mask=old_kept)
    kept = tl.reshape(kept | equal, [LENGTH * LISTS])
    place = tl.reshape(place, [LENGTH * LISTS])
    to = tl.sum(old_kept.to(tl.int32)) + tl.cumsum(kept.to(tl.int32)) - 1
    tl.store(merged_ptr + to, tl.load(entries_ptr + place, mask=kept), mask=kept)


@triton.jit
def positions_kernel(
    best_ptr,
    groups_ptr,
    visible_ptr,
    overflow_ptr,
    selected_ptr,  # [T, TOPK]
    void_ptr,  # [T]
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
):
    """Write a query's positions in ascending order, -1 after the last: all that it sees up to TOPK."""
    slot = tl.program_id(0).to(tl.int64)
    if slot % 4 < tl.load(groups_ptr + slot // 4 * 2 + 1):
        token = tl.load(groups_ptr + slot // 4 * 2).to(tl.int64) + slot % 4
        column = tl.arange(0, TOPK_BLOCK)
        seen = tl.load(visible_ptr + token).to(tl.int32)
        if seen > TOPK:
            entry = tl.load(best_ptr + slot * TOPK + column, mask=column < TOPK, other=0)
            position = tl.sort(-entry.to(tl.int32) + LAST)
        else:
            position = tl.where(column < seen, column, -1)
        tl.store(selected_ptr + token * TOPK + column, position, mask=column < TOPK)
        tl.store(void_ptr + token, tl.load(overflow_ptr + slot))
