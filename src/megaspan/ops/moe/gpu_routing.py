"""Which (token, slot) pairs go to which expert, found on the GPU without waiting for it.

A pair's number is token * k + slot. Many pairs are sorted by expert (a counting sort, stable, two launches)
and a program finds its tile in the sorted order; of few pairs every program finds its own among all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # pairs that a program of the sort counts and places


def sort_pairs(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """expert_ids [T, k] int64 → pairs sorted by expert [T k], and where each expert starts [E + 1], int32.

    Pairs of one expert are in ascending order. A pair whose expert does not exist is left out.
    """
    pairs = expert_ids.numel()
    bins, blocks = triton.next_power_of_2(experts), triton.cdiv(pairs, BLOCK)
    counts = torch.empty(blocks, bins, dtype=torch.int32, device=expert_ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=expert_ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=expert_ids.device)
    sizes = {"EXPERTS": experts, "BINS": bins, "BLOCK": BLOCK}
    _count_kernel[(blocks,)](expert_ids, counts, pairs, **sizes, num_warps=4)
    _place_kernel[(blocks,)](expert_ids, counts, order, starts, pairs, **sizes, CHUNK=32, num_warps=8)
    return order, starts


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids_ptr, counts_ptr, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of a block's pairs go to each expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    real = (expert >= 0) & (expert < EXPERTS)
    counts = tl.histogram(tl.where(real, expert, 0).to(tl.int32), BINS, mask=real)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    starts_ptr,
    pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Places of a block's pairs: after those of lower experts, of earlier blocks and of this block."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    bin = tl.arange(0, BINS)
    total, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for first in range(0, blocks, CHUNK):
        other = first + tl.arange(0, CHUNK)[:, None]
        counts = tl.load(counts_ptr + other * BINS + bin[None, :], mask=other < blocks, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < block, counts, 0), 0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(starts_ptr, 0)
        tl.store(starts_ptr + 1 + bin, ends, mask=bin < EXPERTS)

    place = tl.arange(0, BLOCK)
    pair = block * BLOCK + place
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    real = (expert >= 0) & (expert < EXPERTS)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, BLOCK, CHUNK):
        earlier = first + tl.arange(0, CHUNK)
        there = block * BLOCK + earlier < pairs
        theirs = tl.load(ids_ptr + block * BLOCK + earlier, mask=there, other=-1)
        same = (theirs[None, :] == expert[:, None]) & (earlier[None, :] < place[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    start = tl.gather(ends - total + before, tl.where(real, expert, 0).to(tl.int32), 0)
    tl.store(order_ptr + start + rank, pair, mask=real)


@triton.jit
def tile_of(
    starts_ptr,
    program,
    COLUMN_TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program's expert, its first sorted pair, how many pairs (0: nothing to do), its tile of columns.

    An expert's programs lie together; of these, those with the same columns, which read the same weights.
    """
    bin = tl.arange(0, BINS)
    start = tl.load(starts_ptr + bin, mask=bin < EXPERTS, other=0)
    end = tl.load(starts_ptr + bin + 1, mask=bin < EXPERTS, other=0)
    tiles = tl.cdiv(end - start, TILE)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= program // COLUMN_TILES).to(tl.int32), 0)
    mine = bin == expert
    within = program - tl.sum(tl.where(mine, ends - tiles, 0), 0) * COLUMN_TILES
    my_tiles = tl.maximum(tl.sum(tl.where(mine, tiles, 0), 0), 1)
    first = tl.sum(tl.where(mine, start, 0), 0) + within % my_tiles * TILE
    count = tl.minimum(tl.sum(tl.where(mine, end, 0), 0) - first, TILE)
    return expert, first, tl.where(expert < BINS, count, 0), within // my_tiles


@triton.jit
def pairs_with(ids_ptr, pair, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr):
    """A pair's expert, the numbers of up to TILE pairs of that expert from this one on, and how many.

    So many pairs are computed together; the others of the TILE find 0 pairs: nothing to do.
    """
    other = tl.arange(0, PAIRS)
    experts = tl.load(ids_ptr + other, mask=other < pairs, other=-1)
    expert = tl.load(ids_ptr + pair)
    same = (experts == expert) & (other < pairs)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    mine = tl.sum(tl.where(other < pair, same.to(tl.int32), 0), 0)
    leads = (mine % TILE == 0) & (expert >= 0) & (expert < EXPERTS)
    is_nth = same[None, :] & (rank[None, :] == mine + tl.arange(0, TILE)[:, None])
    together = tl.sum(tl.where(is_nth, other[None, :], 0), 1)
    count = tl.minimum(tl.sum(same.to(tl.int32), 0) - mine, TILE)
    return expert.to(tl.int32), together, tl.where(leads, count, 0)
