"""The distribution that an indexer learns, on a GPU: attention averaged over heads and layers."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


def attention_target(
    layers: Sequence[tuple[Tensor, Tensor]], scale: float, seen: Tensor, target: Tensor
) -> None:
    """Fill target [Q, L] fp32 at the rows that a query sees; elsewhere it stays as it was.

    layers: contiguous queries [Q, H, W] and rows [N, W] in bf16. seen: as for `index_loss`, contiguous; L is
    the number of slots of a selection, or at least the number of rows that any query sees.
    """
    queries, slots = target.shape
    for number, (query, rows) in enumerate(layers):
        heads, width = query.shape[1:]
        wide = max(16, 1 << (width.bit_length() - 1))
        rest = max(0, width - wide)
        _kernel[(queries,)](
            query,
            rows,
            seen,
            target,
            slots,
            rows.stride(0),
            scale * LOG2_E.value,
            1 / (heads * len(layers)),
            ALL_HEADS=heads,
            WIDTH=width,
            HEADS=max(16, triton.next_power_of_2(heads)),
            WIDE=wide,
            REST=max(16, triton.next_power_of_2(rest)) if rest else 0,
            ROWS=32,
            SELECTED=seen.ndim == 2,
            ADD=number > 0,
            num_warps=4,
            num_stages=3,
        )


@triton.jit
def seen_rows(seen_ptr, query, slot, slots, SELECTED: tl.constexpr):
    """The rows of some slots, -1 where the query sees none, and whether it sees them."""
    if SELECTED:
        number = tl.load(seen_ptr + query * slots + slot, mask=slot < slots, other=-1)
        return number, number >= 0
    else:
        number = slot.to(tl.int64)
        return number, slot < tl.load(seen_ptr + query)


@triton.jit
def _scores(
    query,
    query_rest,
    rows_ptr,
    seen_ptr,
    token,
    start,
    slots,
    row_stride,
    scale,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """[HEADS, ROWS] to the base 2, -inf where the query does not see the row, and whether it does [ROWS]."""
    number, is_seen = seen_rows(seen_ptr, token, start + tl.arange(0, ROWS), slots, SELECTED)
    at_row = rows_ptr + number[:, None] * row_stride
    column = tl.arange(0, WIDE)
    rows = tl.load(at_row + column[None], mask=is_seen[:, None] & (column < WIDTH)[None], other=0.0)
    scores = tl.dot(query, rows.T)
    if REST:
        column = WIDE + tl.arange(0, REST)
        rest = tl.load(at_row + column[None], mask=is_seen[:, None] & (column < WIDTH)[None], other=0.0)
        scores = tl.dot(query_rest, rest.T, scores)
    return tl.where(is_seen[None], scores * scale, float("-inf")), is_seen


@triton.jit
def _kernel(
    query_ptr,
    rows_ptr,
    seen_ptr,
    target_ptr,
    slots,
    row_stride,
    scale,
    share,
    ALL_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    SELECTED: tl.constexpr,
    ADD: tl.constexpr,
):
    """One query: first what its scores sum to, then the sum of its heads' probabilities for every row."""
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the last often sees most: let it begin
    head = tl.arange(0, HEADS)
    at_query = query_ptr + (token * ALL_HEADS + head)[:, None] * WIDTH
    is_head = head < ALL_HEADS
    column = tl.arange(0, WIDE)
    query = tl.load(at_query + column[None], mask=is_head[:, None] & (column < WIDTH)[None], other=0.0)
    query_rest = query
    if REST:
        column = WIDE + tl.arange(0, REST)
        query_rest = tl.load(
            at_query + column[None], mask=is_head[:, None] & (column < WIDTH)[None], other=0.0
        )
    length = slots
    if not SELECTED:
        length = tl.minimum(tl.load(seen_ptr + token), slots).to(tl.int32)

    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for start in range(0, length, ROWS):
        scores, _ = _scores(
            query,
            query_rest,
            rows_ptr,
            seen_ptr,
            token,
            start,
            slots,
            row_stride,
            scale,
            WIDTH,
            WIDE,
            REST,
            ROWS,
            SELECTED,
        )
        before, largest = largest, tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp2(before - finite) + tl.sum(tl.exp2(scores - finite[:, None]), 1)
    log2_sum = tl.where(total > 0.0, largest, 0.0) + tl.log2(tl.maximum(total, 1.0))  # the largest adds 1
    for start in range(0, length, ROWS):
        scores, is_seen = _scores(
            query,
            query_rest,
            rows_ptr,
            seen_ptr,
            token,
            start,
            slots,
            row_stride,
            scale,
            WIDTH,
            WIDE,
            REST,
            ROWS,
            SELECTED,
        )
        probability = tl.where(is_head[:, None], tl.exp2(scores - log2_sum[:, None]), 0.0)
        mean = tl.sum(probability, 0) * share
        at_target = target_ptr + token * slots + start + tl.arange(0, ROWS)
        if ADD:
            mean += tl.load(at_target, mask=is_seen, other=0.0)
        tl.store(at_target, mean, mask=is_seen)
