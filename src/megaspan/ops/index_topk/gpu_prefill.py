"""The exact top-k of many queries on a GPU, without ever storing their scores.

The tiles of keys are visited in phases of doubling size, each spread evenly over the context: every S-th
tile, then those half-way between, and so on. A query's K best of the phases so far are those of a sample of
its context, so their worst is a threshold that about K of the next phase's keys pass, wherever in the context
the good keys are. What passes is appended to lists, one for each row of a tile, so that a thread appends to
its own without asking anyone; then the best K of the old best and the lists are kept. A list that overflows
marks its query, which is then selected for in another way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.index_topk.gpu_keys import KEYS, query_columns, tile_rows, tile_scores, values_and_scales
from megaspan.ops.index_topk.gpu_merge import merge_kernel, positions_kernel
from megaspan.ops.rows import RowTable

TILE = tl.constexpr(KEYS)
SAMPLE_TILES = 64  # at most in the first phase: all of their keys are kept
LIST_LENGTH = 128  # in all splits together: 4 times what a phase adds if the topk are 2048
PROGRAMS = 132 * 4  # that an H200 runs at once
MAX_SPLITS = 8
GROUP = 4  # queries of a sequence that are scored together
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _append(at, entries, score, low, threshold, threshold_low, end, ASSEMBLY: tl.constexpr):
    """Append (low, score) to the list whose next entry is `at` if it beats the threshold; return the next.

    NaN counts as -inf; of equal scores the larger low is the better. Entries of the 64 lists of a tile's rows
    take turns. In assembly, because a store of Triton's own would first move the scores to other threads.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred better, fits;
            .reg .b64 place;
            .reg .f32 score;
            max.f32 score, $3, 0fFF800000;
            setp.gt.s32 better, $4, $6;
            setp.eq.and.f32 better, score, $5, better;
            setp.gt.or.f32 better, score, $5, better;
            setp.lt.and.u32 fits, $1, $7, better;
            mad.wide.u32 place, $1, 8, $2;
            @fits st.global.v2.b32 [place], {$4, score};
            mov.b32 $0, $1;
            @better add.s32 $0, $1, 64;
            }""",
            "=r,r,l,r,r,r,r,r",
            [at, entries, score, low, threshold, threshold_low, end],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        score = tl.where(score == score, score, -float("inf"))
        better = (score > threshold) | ((score == threshold) & (low > threshold_low))
        entry = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low.to(tl.int64)
        place = entries.to(tl.pointer_type(tl.int64), bitcast=True) + at
        tl.store(place, entry, mask=better & (at < end))
        return at + 64 * better.to(tl.int32)


@triton.jit
def _filter_kernel(
    query_ptr,  # [T, H, D]
    weights_ptr,  # [T, H]
    keys_ptr,
    scales_ptr,
    starts_ptr,
    pages,
    groups_ptr,  # [G, 2]: first query and number of queries of each group
    sequence_ids_ptr,
    visible_ptr,
    threshold_ptr,  # [G, 4] fp32
    threshold_low_ptr,  # [G, 4]
    entries_ptr,  # [G, 4, splits, LENGTH, TILE]: each row's list of (score, LAST - position)
    counts_ptr,  # [G, 4, splits, TILE]
    offset,
    stride,
    LENGTH: tl.constexpr,
    TOPK: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    group, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = tl.load(groups_ptr + 2 * group).to(tl.int64)
    count = tl.load(groups_ptr + 2 * group + 1)
    sequence = tl.load(sequence_ids_ptr + token)

    member, head = query_columns(H, 4)
    row = (token + tl.minimum(member, count - 1)) * H + head
    query = tl.load(query_ptr + row[:, None] * D + tl.arange(0, D)[None, :])
    weights = tl.load(weights_ptr + row)
    if FP8:
        query = query.to(tl.float8e4nv)

    member = tl.expand_dims(tl.arange(0, 4), 0)
    slot = group * 4 + member
    seen = tl.load(visible_ptr + token + member, mask=member < count, other=0).to(tl.int32)
    choosing = seen > TOPK  # the others select all that they see
    threshold = tl.load(threshold_ptr + slot, mask=choosing, other=float("inf"))
    threshold_low = tl.load(threshold_low_ptr + slot, mask=choosing, other=LAST)
    longest = tl.max(tl.where(choosing, seen, 0))
    shortest = tl.min(tl.where(choosing, seen, LAST))

    # The phase's tiles offset + j * stride; this split's j, first those that every query sees in full.
    phase = tl.maximum((tl.cdiv(longest, TILE) - offset + stride - 1) // stride, 0)
    each = tl.cdiv(phase, splits)
    first = tl.minimum(split * each, phase)
    last = tl.minimum(first + each, phase)
    full = tl.maximum(shortest // TILE - offset + stride - 1, 0) // stride
    full = tl.minimum(tl.maximum(full, first), last)

    key = tl.expand_dims(tl.arange(0, TILE), 1)
    begin = (slot * splits + split) * (LENGTH * TILE) + key
    end = begin + LENGTH * TILE
    at = begin
    entries = entries_ptr.to(tl.int64, bitcast=True)
    ahead = tl.where(first < last, offset + first * stride, 0)
    rows = tile_rows(starts_ptr, sequence, ahead, longest, pages, PAGE, ASSEMBLY)
    for j in tl.range(first, full, num_stages=STAGES):
        here = rows
        tile = offset + j * stride
        ahead = offset + tl.minimum(j + 1, last - 1) * stride
        rows = tile_rows(starts_ptr, sequence, ahead, longest, pages, PAGE, ASSEMBLY)
        scores = tile_scores(query, weights, keys_ptr, scales_ptr, here, tile, 0, False, PAGE, D, FP8, 4)
        low = -key - tile * TILE + LAST
        at = _append(at, entries, scores, low, threshold, threshold_low, end, ASSEMBLY)
    for j in range(full, last):
        tile = offset + j * stride
        here = tile_rows(starts_ptr, sequence, tile, longest, pages, PAGE, ASSEMBLY)
        left = longest - tile * TILE
        scores = tile_scores(query, weights, keys_ptr, scales_ptr, here, tile, left, True, PAGE, D, FP8, 4)
        visible = tile * TILE + key < seen
        scores = tl.where(visible, scores, -float("inf"))
        low = tl.where(visible, -key - tile * TILE + LAST, -1)  # which passes no threshold
        at = _append(at, entries, scores, low, threshold, threshold_low, end, ASSEMBLY)
    tl.store(counts_ptr + (slot * splits + split) * TILE + key, (at - begin) // TILE)


def index_topk_prefill(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    groups: Tensor,
    sequence_ids: Tensor,
    visible: Tensor,
    selected: Tensor,
    void: Tensor,
    longest: int,
) -> None:
    """Write to selected [T, topk] int32 the rows of the groups [G, 2], each up to 4 queries in a row.

    keys: the cache's storage. void: [T] int32 zeros, afterwards 1 where a query's row is void because a list
    overflowed, which takes keys that are good in a pattern. longest: no query sees more. The other
    arguments are those of `index_topk`.
    """
    heads, width = query.shape[1:]
    topk = selected.shape[1]
    slots, splits = 4 * len(groups), _splits(len(groups))
    length = max(32, LIST_LENGTH // splits)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=query.device)

    entries = empty(slots, splits, length, KEYS, dtype=torch.int64)
    counts = empty(slots, splits, KEYS)
    best, merged = (empty(slots, topk, dtype=torch.int64) for _ in range(2))
    best_counts, overflow = empty(slots).zero_(), empty(slots).zero_()
    threshold, threshold_low = empty(slots, dtype=torch.float32).fill_(-torch.inf), empty(slots).fill_(-1)
    lists = entries, counts, threshold, threshold_low
    cache = *values_and_scales(keys, table), table.starts, table.starts.shape[1]
    block = triton.next_power_of_2(topk)
    for offset, stride in phases(-(-longest // KEYS)):
        _filter_kernel[(len(groups), splits)](
            query,
            weights,
            *cache,
            groups,
            sequence_ids,
            visible,
            threshold,
            threshold_low,
            entries,
            counts,
            offset,
            stride,
            LENGTH=length,
            TOPK=topk,
            H=heads,
            D=width,
            PAGE=0 if table.starts.shape[1] == 1 else table.page_size,
            FP8=keys.dtype == torch.uint8,
            STAGES=4,
            ASSEMBLY=query.is_cuda,
            num_warps=4,
        )
        sizes = dict(TOPK=topk, TOPK_BLOCK=block, LISTS=splits * KEYS, LENGTH=length)
        merge_kernel[(slots,)](best, merged, best_counts, *lists, overflow, **sizes, num_warps=8)
        best, merged = merged, best
    operands = best, groups, visible, overflow, selected, void
    positions_kernel[(slots,)](*operands, TOPK=topk, TOPK_BLOCK=block, num_warps=8)


def group_bytes(topk: int) -> int:
    """Working memory of a group, at most."""
    return GROUP * (12 * KEYS * max(LIST_LENGTH, 32 * MAX_SPLITS) + 16 * topk + 16)


def _splits(groups: int) -> int:
    """Programs that share the keys of a group, so that there are enough to fill the GPU."""
    return min(MAX_SPLITS, triton.next_power_of_2(-(-PROGRAMS // max(1, groups))))


def phases(tiles: int) -> list[tuple[int, int]]:
    """(offset, stride) of the tiles of each phase: together all, the first phase at most SAMPLE_TILES."""
    stride = triton.next_power_of_2(-(-tiles // SAMPLE_TILES))
    result = [(0, stride)]
    while stride > 1:
        result.append((stride // 2, stride))
        stride //= 2
    return result
