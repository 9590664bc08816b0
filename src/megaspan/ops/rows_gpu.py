"""Row numbers of positions in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # positions of one program


@triton.jit(do_not_specialize=["tokens"])
def _rows(
    starts_ptr,
    sequence_ids_ptr,
    positions_ptr,
    rows_ptr,
    tokens,
    slots,
    starts_stride,
    page_stride,
    sequence_ids_stride,
    token_stride,
    slot_stride,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """A tile of TOKENS x SLOTS positions [T, K]. PAGE 0: a sequence has one page, however long."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    inside = (token < tokens)[:, None] & (slot < slots)[None]
    place = token[:, None] * token_stride + slot[None].to(tl.int64) * slot_stride
    position = tl.load(positions_ptr + place, mask=inside, other=-1)
    sequence = tl.load(sequence_ids_ptr + token * sequence_ids_stride, mask=token < tokens, other=0).to(
        tl.int64
    )
    first_page = starts_ptr + sequence[:, None] * starts_stride
    if PAGE == 0:
        start = tl.load(first_page, mask=(token < tokens)[:, None], other=0)
        row = start + position
    else:
        page = (position // PAGE).to(tl.int64)
        start = tl.load(first_page + page * page_stride, mask=inside & (position >= 0), other=0)
        row = start + position % PAGE
    row = tl.where(position < 0, -1, row)
    tl.store(rows_ptr + token[:, None] * slots + slot[None], row, mask=inside)


def rows_gpu(starts: Tensor, page_size: int, sequence_ids: Tensor, positions: Tensor) -> Tensor:
    """See `RowTable.rows`. A sequence that is not in the table is not noticed: what lies there is read."""
    tokens, slots = positions.shape
    rows = torch.empty(tokens, slots, dtype=torch.int64, device=positions.device)
    if not rows.numel():
        return rows
    slots_of_tile = min(BLOCK, triton.next_power_of_2(slots))
    tokens_of_tile = BLOCK // slots_of_tile
    grid = triton.cdiv(tokens, tokens_of_tile), triton.cdiv(slots, slots_of_tile)
    _rows[grid](
        starts,
        sequence_ids,
        positions,
        rows,
        tokens,
        slots,
        *starts.stride(),
        sequence_ids.stride(0),
        *positions.stride(),
        PAGE=0 if starts.shape[1] == 1 else page_size,
        TOKENS=tokens_of_tile,
        SLOTS=slots_of_tile,
    )
    return rows
