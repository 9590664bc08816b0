"""Binding of the CUDA files beside it, the lightning indexer's selection on Hopper.

The ways are those of `gpu_prefill` and `gpu_decode`, with what the chip offers.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import cuda
from megaspan.ops.rows import RowTable

PREFILL, SCORE, SELECT = (Path(__file__).parent / name for name in ("prefill.cu", "score.cu", "select.cu"))
HEADS, WIDTH, PAGE = 32, 128, 64
PROCESSORS = 132  # of an H200
GROUP, FILTER_THREADS = 12, 416  # of the kernels; queries of a sequence that are scored together in a prefill
SAMPLE_PAGES = 64  # at most in the first phase: all of their keys are kept
CAPACITY = 4096  # of a query's lists: twice what a phase is expected to add
SLACK = 512  # of the kernels
MAX_SPLITS = 8
SCORE_BLOCKS = {1: 4, 4: 3}  # on a processor, by the queries that a block scores together
MOST_GROUPS = 256  # that one launch scores in decoding
RANKED, LISTED, RUNS = 16384, 8192, 8192  # of the kernels
LONGEST = 64 * RANKED  # context whose maxima fit
FILTER_SHARED, SCORE_SHARED = 125 << 10, {1: 49 << 10, 4: 61 << 10}
SCRATCH = 5 << 10
LIST_SHARED, CHOOSE_SHARED = 4 * RUNS + SCRATCH, 8 * LISTED + SCRATCH
LIST_BLOCKS = 128  # enough to be quick about it; each finds the threshold anew


class Groups(ctypes.Structure):
    """Mirror of Groups in scores.cuh."""

    _fields_ = [("listed", ctypes.c_void_p), ("size", ctypes.c_int32)]

    @classmethod
    def of(cls, groups: Tensor | int) -> "Groups":
        return cls(0, groups) if isinstance(groups, int) else cls(groups.data_ptr(), 0)


def supports(query: Tensor, keys: Tensor, table: RowTable, topk: int, longest: int) -> bool:
    """Whether the kernels take these tensors, in the widths that GLM-5.2 has, and can be built here."""
    return (
        query.shape[1:] == (HEADS, WIDTH)
        and keys.dtype == torch.uint8
        and table.page_size == PAGE
        and topk <= CAPACITY // 2
        and longest <= LONGEST
        and query.data_ptr() % 16 == keys.data_ptr() % 16 == 0
        and cuda.can_run(query.device, PREFILL, SCORE, SELECT)
    )


def index_topk_prefill(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    groups: Tensor,
    sequence_ids: Tensor,
    visible: Tensor,
    selected: Tensor,
    overflow: Tensor,
    longest: int,
) -> None:
    """As `gpu_prefill.index_topk_prefill`, for groups of up to GROUP queries."""
    topk, slots = selected.shape[1], len(groups) * GROUP

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(slots, *shape, dtype=dtype, device=query.device)

    lists, best, merged = numbers(CAPACITY), numbers(topk + SLACK), numbers(topk + SLACK)
    thresholds, best_counts = numbers().zero_(), numbers(dtype=torch.int32).zero_()
    counts = numbers(MAX_SPLITS, dtype=torch.int32)
    filter_keys, merge_best = cuda.kernel(PREFILL, "filter_keys"), cuda.kernel(PREFILL, "merge_best")
    listed, room = Groups.of(groups), sorting_room(topk)
    operands = _page_map(keys), keys, query, weights, table.starts, table.starts.shape[1], listed
    merge_shared = 8 * (topk + 1 + SLACK + CAPACITY) + 4 * room
    pages = -(-longest // PAGE)
    plan = phases(pages)
    for offset, stride in plan:
        splits = _splits(len(groups), -(-(pages - offset) // stride))
        lengths = splits, CAPACITY // splits, topk
        places = sequence_ids, visible, thresholds, lists, counts, *lengths[1:], offset, stride
        filter_keys((len(groups), splits), FILTER_THREADS, FILTER_SHARED, *operands, *places)
        state = best, merged, best_counts, lists, counts, thresholds, overflow, *lengths
        result = selected if (offset, stride) == plan[-1] else None
        merge_best((slots,), 512, merge_shared, *state, listed, visible, result, room)
        best, merged = merged, best


def group_bytes(topk: int) -> int:
    """Working memory of a group in a prefill."""
    return GROUP * (8 * CAPACITY + 16 * (topk + SLACK) + 4 * MAX_SPLITS + 12)


def _splits(groups: int, pages: int) -> int:
    """Blocks that share a group's pages of a phase: enough for the last ones to leave few processors idle."""
    splits, least = 1, 128 if groups >= PROCESSORS else 16
    while splits < MAX_SPLITS and splits * groups < 6 * PROCESSORS and pages >= 2 * splits * least:
        splits *= 2
    return splits


def phases(pages: int) -> list[tuple[int, int]]:
    """(offset, stride) of the pages of each phase: together all, the first phase at most SAMPLE_PAGES."""
    stride = 1
    while stride * SAMPLE_PAGES < pages:
        stride *= 2
    result = [(0, stride)]
    while stride > 1:
        result.append((stride // 2, stride))
        stride //= 2
    return result


def index_topk_decode(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    groups: Tensor | int,
    members: int,
    sequence_ids: Tensor,
    visible: Tensor,
    selected: Tensor,
    longest: int,
    budget_bytes: int,
) -> None:
    """As `gpu_decode.index_topk_decode`; groups may be one number, the size of all, which needs no memory."""
    topk, members = selected.shape[1], 1 if members == 1 else 4
    length = -(-longest // PAGE) * PAGE
    group_bytes = members * (4 * length + 4 * RANKED + length // 4 + 8 * LISTED)
    number = len(query) // groups if isinstance(groups, int) else len(groups)
    together = min(number, MOST_GROUPS, budget_bytes // group_bytes)
    if not together:
        raise ValueError(f"index_topk needs a budget of at least {group_bytes} bytes, not {budget_bytes}")
    parts = max(1, min(16, LIST_BLOCKS // (together * members)))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(together * members, *shape, dtype=dtype, device=query.device)

    scores, maxima, run_maxima = empty(length), empty(RANKED), empty(length // 16)
    lists, listed = empty(parts, LISTED, dtype=torch.int64), empty(parts, dtype=torch.int32)
    score_keys = cuda.kernel(SCORE, f"score_keys_{members}")
    list_keys, choose_keys = cuda.kernel(SELECT, "list_keys"), cuda.kernel(SELECT, "choose_keys")
    cache = _page_map(keys), keys
    pages, room = (table.starts, table.starts.shape[1]), sorting_room(topk)
    stored = scores, length, maxima, run_maxima
    for first in range(0, number, together):
        count = min(together, number - first)
        if isinstance(groups, int):
            tokens = slice(first * groups, (first + count) * groups)
            part, own = (
                Groups.of(groups),
                [each[tokens] for each in (query, weights, sequence_ids, visible, selected)],
            )
        else:
            part, own = Groups.of(groups[first:]), [query, weights, sequence_ids, visible, selected]
        grid, shared = (SCORE_BLOCKS[members] * PROCESSORS,), SCORE_SHARED[members]
        score_keys(grid, 160, shared, *cache, *own[:2], *pages, part, count, *own[2:4], *stored, topk)
        place, slots = (part, members, own[3]), count * members
        list_keys((slots, parts), 1024, LIST_SHARED, *place, *stored, lists, listed, topk)
        found = scores, length, lists, listed, parts, own[4], topk, room
        choose_keys((slots,), 1024, CHOOSE_SHARED + 4 * room, *place, *found)


def sorting_room(topk: int) -> int:
    """How many numbers are sorted: a power of two, and no fewer than a warp sorts."""
    return max(128, 1 << (topk - 1).bit_length())


def _page_map(keys: Tensor) -> cuda.TensorMap:
    """Boxes of a page's values in the storage uint8 [N, WIDTH + 4]."""
    sizes = WIDTH, PAGE, len(keys) // PAGE
    return cuda.tensor_map(keys, cuda.UINT8, sizes, (WIDTH, PAGE * (WIDTH + 4)), (WIDTH, PAGE, 1))
