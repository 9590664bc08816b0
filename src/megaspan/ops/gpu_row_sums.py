"""Sums by row on a GPU in a fixed order: a scattered addition that has equal bits on repeat."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORK_BYTES = 32  # for each contribution: its row's number, sorted, and the sort's own space
COLUMNS = 512  # a program's columns; rows that are a little wider give it a narrow second part


def sum_by_row(contributions: Tensor, row_numbers: Tensor, total: Tensor, add: bool = False) -> None:
    """total[n] = the sum of the contributions whose row number is n, or that and what it held if `add`.

    contributions: [P, W] bf16 or fp32. row_numbers: [P] int64 below N; -1 belongs to no row, and that
    contribution is never read. total: [N, W], every row of which is written. Sums are in fp32, in an order
    that follows from the row numbers alone. Working memory: WORK_BYTES a contribution.
    """
    row_count, width = total.shape
    if not row_count or not width:
        return
    in_order, order = row_numbers.int().sort(stable=True)
    starts = torch.searchsorted(in_order, torch.arange(row_count + 1, device=total.device, dtype=torch.int32))
    wide = min(COLUMNS, 1 << (width.bit_length() - 1))
    rest = width % wide
    _sum_by_row[(row_count, width // wide)](
        contributions,
        order,
        starts,
        total,
        WIDTH=width,
        WIDE=wide,
        REST=triton.next_power_of_2(rest) if rest else 0,
        ENTRIES=16,
        ADD=add,
        num_warps=max(1, wide // 256),  # a thread has the same columns of every entry: sums need no exchange
    )


@triton.jit
def _sum_by_row(
    contributions_ptr,
    order_ptr,
    starts_ptr,
    total_ptr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    ENTRIES: tl.constexpr,
    ADD: tl.constexpr,
):
    """One row and WIDE of its columns; the last part takes the REST of them too."""
    row = tl.program_id(0).to(tl.int64)
    last_part = tl.program_id(1) == tl.num_programs(1) - 1
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    sums = tl.zeros((WIDE,), tl.float32)
    if REST:
        rest_column = WIDTH - WIDTH % WIDE + tl.arange(0, REST)
        rest_mask = (rest_column < WIDTH) & last_part
        rest_sums = tl.zeros((ENTRIES, REST), tl.float32)
    for start in range(first, last, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        is_entry = entry < last
        at = contributions_ptr + tl.load(order_ptr + entry, mask=is_entry, other=0)[:, None] * WIDTH
        sums += tl.sum(tl.load(at + column[None], mask=is_entry[:, None], other=0.0).to(tl.float32), 0)
        if REST:
            rest = tl.load(at + rest_column[None], mask=is_entry[:, None] & rest_mask[None], other=0.0)
            rest_sums += rest.to(tl.float32)
    at_total = total_ptr + row * WIDTH
    _store(at_total + column, sums, column < WIDTH, ADD)
    if REST:
        _store(at_total + rest_column, tl.sum(rest_sums, 0), rest_mask, ADD)


@triton.jit
def _store(place, value, mask, ADD: tl.constexpr):
    if ADD:
        value += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, value.to(place.dtype.element_ty), mask=mask)
