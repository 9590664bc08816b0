"""The selection among the stored scores of few queries on a GPU."""

import triton
import triton.language as tl

from megaspan.ops.index_topk.gpu_keys import KEYS, lows, ordered, ranks, score_of, with_bit

TILE = tl.constexpr(KEYS)
BLOCK = tl.constexpr(8192)  # scores that a program looks at together
LISTED = tl.constexpr(16384)  # candidates of a query that are listed
FEW = tl.constexpr(4096)
ROUGH_BITS = tl.constexpr(24)  # of a threshold that need only be low enough
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def tiles_of_maximum(seen, MAXIMA: tl.constexpr):
    """A group of keys is 16 rows of a tile, or the same 16 rows of 4 tiles in a row of a longer context."""
    return tl.where(seen > 16 * MAXIMA, 4, 1)


@triton.jit
def list_kernel(
    groups_ptr,
    visible_ptr,
    scores_ptr,
    length,
    maxima_ptr,
    listed_ptr,
    list_ptr,  # [G, QUERIES, LISTED] int64: score in the upper half, LAST - position in the lower
    QUERIES: tl.constexpr,
    MAXIMA: tl.constexpr,
    TOPK: tl.constexpr,
):
    """List the keys of a query that reach the TOPK-th largest maximum. Every program finds that anew."""
    slot = tl.program_id(0).to(tl.int64)
    token = tl.load(groups_ptr + slot // QUERIES * 2)
    count = tl.load(groups_ptr + slot // QUERIES * 2 + 1)
    longest = tl.zeros([], tl.int32)
    for member in tl.static_range(QUERIES):
        other = tl.load(visible_ptr + token + tl.minimum(member, count - 1)).to(tl.int32)
        longest = tl.maximum(longest, other)
    member = (slot % QUERIES).to(tl.int32)
    seen = tl.load(visible_ptr + token + member, mask=member < count, other=0).to(tl.int32)
    first = tl.program_id(1) * BLOCK
    if (seen > TOPK) & (first < seen):
        scores_ptr += slot * length
        maxima_ptr += slot * MAXIMA
        together = tiles_of_maximum(longest, MAXIMA)
        stored = seen > 4 * MAXIMA
        index = tl.arange(0, MAXIMA)
        if stored:
            filled = tl.cdiv(tl.cdiv(seen, TILE), together) * (TILE // 16)
            highest = tl.load(maxima_ptr + index, mask=index < filled, other=-float("inf"))
        else:
            at = tl.expand_dims(index * 4, 1) + tl.expand_dims(tl.arange(0, 4), 0)
            highest = tl.max(tl.load(scores_ptr + at, mask=at < seen, other=-float("inf")), 1)
        rank = ordered(highest)
        cut = tl.zeros([], tl.uint32)
        for bit in range(ROUGH_BITS):
            candidate = with_bit(cut, bit)
            cut = tl.where(tl.sum((rank >= candidate).to(tl.int32)) >= TOPK, candidate, cut)
        least = tl.where(cut <= 0x007FFFFF, -float("inf"), score_of(cut))  # the rank of -inf

        sixteen = tl.arange(0, BLOCK // 16)
        inside = tl.expand_dims(tl.arange(0, 16), 0)
        for start in range(first, seen, tl.num_programs(1) * BLOCK):
            position = tl.expand_dims(start + sixteen * 16, 1) + inside
            hopeful = start + sixteen * 16 < seen
            if stored:
                tile, quarter = start // TILE + sixteen // 4, sixteen % 4
                place = maxima_ptr + tile // together * (TILE // 16) + quarter
                hopeful = hopeful & (tl.load(place, mask=hopeful, other=-float("inf")) >= least)
            wanted = tl.expand_dims(hopeful, 1) & (position < seen)
            scores = tl.load(scores_ptr + position, mask=wanted, other=-float("inf"))
            kept = tl.reshape(wanted & (scores >= least), [BLOCK])
            many = tl.sum(kept.to(tl.int32))
            place = tl.atomic_add(listed_ptr + slot, many) + tl.cumsum(kept.to(tl.int32)) - 1
            low = (-position + LAST).to(tl.int64)
            entry = tl.reshape((scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low, [BLOCK])
            tl.store(list_ptr + slot * LISTED + place, entry, mask=kept & (place < LISTED))


@triton.jit
def _best_of_list(list_ptr, listed, selected_ptr, TOPK: tl.constexpr, SIZE: tl.constexpr):
    """Write the positions of the TOPK best entries, in any order; equals by the lowest position."""
    index = tl.arange(0, SIZE)
    there = index < listed
    rank = ranks(list_ptr, index, there)
    cut = tl.zeros([], tl.uint32)
    for bit in range(32):
        candidate = with_bit(cut, bit)
        cut = tl.where(tl.sum((rank >= candidate).to(tl.int32)) >= TOPK, candidate, cut)
    better = tl.sum((rank > cut).to(tl.int32))
    equal = there & (rank == cut)
    low = lows(list_ptr, index, there & (rank >= cut))
    low_cut = tl.zeros([], tl.int32)
    if better + tl.sum(equal.to(tl.int32)) > TOPK:
        for bit in range(1, 32):
            candidate = low_cut | (1 << (31 - bit))
            above = tl.sum((equal & (low >= candidate)).to(tl.int32))
            low_cut = tl.where(above >= TOPK - better, candidate, low_cut)
    kept = (rank > cut) | (equal & (low >= low_cut))
    tl.store(selected_ptr + tl.cumsum(kept.to(tl.int32)) - 1, -low + LAST, mask=kept)


@triton.jit
def _best_of_all(scores_ptr, seen, selected_ptr, TOPK: tl.constexpr):
    """Write the positions of the TOPK best scores in order, reading all once for every bit of the cut."""
    index = tl.arange(0, BLOCK)
    cut = tl.zeros([], tl.uint32)
    for bit in range(32):
        candidate = with_bit(cut, bit)
        above = tl.zeros([BLOCK], tl.int32)
        for start in range(0, seen, BLOCK):
            score = tl.load(scores_ptr + start + index, mask=start + index < seen, other=float("nan"))
            above += ((score == score) & (ordered(score) >= candidate)).to(tl.int32)
        cut = tl.where(tl.sum(above) >= TOPK, candidate, cut)
    better = tl.zeros([BLOCK], tl.int32)
    for start in range(0, seen, BLOCK):
        score = tl.load(scores_ptr + start + index, mask=start + index < seen, other=float("nan"))
        better += ((score == score) & (ordered(score) > cut)).to(tl.int32)
    needed = TOPK - tl.sum(better)
    written, equal_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, seen, BLOCK):
        score = tl.load(scores_ptr + start + index, mask=start + index < seen, other=float("nan"))
        real = score == score
        rank = ordered(score)
        equal = (real & (rank == cut)).to(tl.int32)
        first_equal = (equal == 1) & (equal_before + tl.cumsum(equal) <= needed)
        kept = (real & (rank > cut)) | first_equal
        place = written + tl.cumsum(kept.to(tl.int32)) - 1
        tl.store(selected_ptr + place, start + index, mask=kept)
        written += tl.sum(kept.to(tl.int32))
        equal_before += tl.sum(equal)


@triton.jit
def select_kernel(
    groups_ptr,
    visible_ptr,
    scores_ptr,
    length,
    listed_ptr,
    list_ptr,
    selected_ptr,  # [T, TOPK]
    QUERIES: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    member = (slot % QUERIES).to(tl.int32)
    if member < tl.load(groups_ptr + slot // QUERIES * 2 + 1):
        token = tl.load(groups_ptr + slot // QUERIES * 2).to(tl.int64) + member
        seen = tl.load(visible_ptr + token).to(tl.int32)
        listed = tl.load(listed_ptr + slot)
        selected_ptr += token * TOPK
        column = tl.arange(0, TOPK_BLOCK)
        if seen <= TOPK:
            tl.store(selected_ptr + column, tl.where(column < seen, column, -1), mask=column < TOPK)
        elif listed > LISTED:
            _best_of_all(scores_ptr + slot * length, seen, selected_ptr, TOPK)
        else:
            if listed <= FEW:
                _best_of_list(list_ptr + slot * LISTED, listed, selected_ptr, TOPK, FEW)
            else:
                _best_of_list(list_ptr + slot * LISTED, listed, selected_ptr, TOPK, LISTED)
            tl.debug_barrier()
            position = tl.load(selected_ptr + column, mask=column < TOPK, other=LAST)
            tl.store(selected_ptr + column, tl.sort(position), mask=column < TOPK)
