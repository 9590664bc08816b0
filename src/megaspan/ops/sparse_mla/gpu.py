"""Sparse latent attention on a GPU: `cuda` where it takes the operands, else the same in Triton.

A program has up to 64 heads of a token and every `splits`-th step of its selection, 64 rows each. So the
result depends on the selected rows, on their order and on `splits`, and not on how many empty slots follow.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.quant.latent_rows import GROUP, latent_row_bytes
from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import cuda

ROWS = 64  # of a step
PROGRAMS = 128  # at once; fewer are made more by splitting the selections
MOST_SPLITS = 32
INVARIANT_SPLITS = 4  # in batch-invariant mode: a compromise between few tokens and many
PARTIAL_BYTES = 256 << 20  # of the parts' results at once
SLOT_BYTES = 32  # of temporaries for one token and position, while the row's number is looked up
LOWEST = tl.constexpr(-1e30)  # of a maximum, where no score was seen


def supports(query: Tensor, rows: Tensor, value_width: int) -> bool:
    """Whether the kernels take these operands: bf16 on a GPU, rows bf16 or FP8, widths in steps of 16."""
    rope_width = query.shape[2] - value_width
    packed = rows.dtype == torch.uint8 and rows.shape[1] == latent_row_bytes(value_width, rope_width)
    return (
        query.is_cuda
        and query.dtype == torch.bfloat16
        and (packed or (rows.dtype == torch.bfloat16 and rows.shape[1] == query.shape[2]))
        and rows.is_contiguous()
        and 16 <= value_width <= 512
        and value_width % 16 == rope_width % 16 == 0
        and 16 <= rope_width <= 128
    )


def sparse_mla_gpu(
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    value_width: int,
    scale: float,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sparse_mla`, for operands that `supports` accepts, without gradients.

    splits: into how many parts, of 32 at most, each selection is split, which are worked on at once. With a
        given number a token's bits depend on its query and its rows alone. None chooses it by the shape.
    Returns [T, H, value_width] bf16, and [T, H] fp32: the natural logarithms of the sums over the selected
    rows of exp(scale * score). A token that selected nothing has zeros and -inf.
    """
    heads = query.shape[1]
    tokens = max(1, PARTIAL_BYTES // (4 * heads * value_width * (splits or 1)))
    if (splits or 1) > 1 and len(query) > tokens:
        turns = zip(query.split(tokens), selected.split(tokens), strict=True)
        parts = [sparse_mla_gpu(some, rows, own, value_width, scale, splits) for some, own in turns]
        outputs, sums = zip(*parts, strict=True)
        return torch.cat(outputs), torch.cat(sums)
    if cuda.supports(query, rows, value_width):
        return cuda.sparse_mla_cuda(query, rows, selected, scale, splits)
    return sparse_mla_triton(query, rows, selected, value_width, scale, splits)


def visible_mla_gpu(
    query: Tensor,
    rows: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    value_width: int,
    scale: float,
    budget_bytes: int,
) -> Tensor:
    """As `visible_mla`: the bits of `sparse_mla` in batch-invariant mode."""
    output = query.new_empty(*query.shape[:2], value_width)
    longest = int(visible.max()) if len(query) else 0
    positions_L = torch.arange(longest, device=query.device)
    tokens = max(1, budget_bytes // max(1, longest * SLOT_BYTES))
    for start in range(0, len(query), tokens):
        tile = slice(start, start + tokens)
        positions_TL = positions_L.where(positions_L < visible[tile, None], -1)
        numbers_TL = table.rows(sequence_ids[tile], positions_TL)
        operands = query[tile], rows, numbers_TL, value_width, scale
        output[tile], _ = sparse_mla_gpu(*operands, INVARIANT_SPLITS)
    return output


def sparse_mla_triton(
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    value_width: int,
    scale: float,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sparse_mla_gpu`, on any GPU that Triton knows."""
    (tokens, heads, width), slots = query.shape, selected.shape[1]
    heads_together = max(16, min(64, triton.next_power_of_2(heads)))
    groups = triton.cdiv(heads, heads_together)
    splits = splits or splits_for(tokens * groups, slots)
    output = query.new_empty(tokens, heads, value_width)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    if not output.numel():
        return output, lse
    partial, partial_lse = output, lse
    if splits > 1:
        partial = torch.empty(tokens, splits, heads, value_width, dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(tokens, splits, heads, dtype=torch.float32, device=query.device)
    values_padded = triton.next_power_of_2(value_width)
    _attention[(tokens * groups, splits)](
        query.contiguous(),
        rows,
        selected.contiguous(),
        partial,
        partial_lse,
        scale * math.log2(math.e),
        slots,
        HEADS=heads,
        GROUP_HEADS=heads_together,
        VALUES=value_width,
        VALUES_PADDED=values_padded,
        ROTARY=width - value_width,
        ROTARY_PADDED=triton.next_power_of_2(width - value_width),
        SCALED=min(GROUP, values_padded),
        PACKED_ROW=rows.shape[1] if rows.dtype == torch.uint8 else 0,
        ROWS=ROWS,
        num_warps=8 if heads_together == 64 else 4,
        num_stages=2,
    )
    if splits > 1:
        _combine[(tokens * heads,)](
            partial,
            partial_lse,
            output,
            lse,
            splits,
            HEADS=heads,
            VALUES=value_width,
            VALUES_PADDED=values_padded,
            SPLITS=triton.next_power_of_2(splits),
        )
    return output, lse


def splits_for(programs: int, slots: int) -> int:
    """Parts of a selection, for so many pairs of a token and a group of heads: most processors have one."""
    steps = -(-slots // ROWS)
    wanted = min(MOST_SPLITS, max(1, PROGRAMS // max(1, programs)))
    return -(-steps // -(-steps // wanted)) if steps else 1


@triton.jit(do_not_specialize=["slots"])
def _attention(
    query_ptr,
    rows_ptr,
    selected_ptr,
    output_ptr,
    lse_ptr,
    scale_log2,
    slots,
    HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED_ROW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A split of a selection for a group of heads; its own softmax. PACKED_ROW: bytes of an FP8 row, or 0."""
    groups: tl.constexpr = (HEADS + GROUP_HEADS - 1) // GROUP_HEADS
    token = (tl.program_id(0) // groups).to(tl.int64)
    split, splits = tl.program_id(1), tl.num_programs(1)
    head = tl.program_id(0) % groups * GROUP_HEADS + tl.arange(0, GROUP_HEADS)
    value, rotary = tl.arange(0, VALUES_PADDED), tl.arange(0, ROTARY_PADDED)
    is_head, is_value, is_rotary = head < HEADS, value < VALUES, rotary < ROTARY
    query_row = query_ptr + (token * HEADS + head)[:, None] * (VALUES + ROTARY)
    query = tl.load(query_row + value[None], mask=is_head[:, None] & is_value[None], other=0.0)
    query_rotary = tl.load(
        query_row + VALUES + rotary[None], mask=is_head[:, None] & is_rotary[None], other=0.0
    )
    maximum = tl.full([GROUP_HEADS], LOWEST, tl.float32)
    total = tl.zeros([GROUP_HEADS], tl.float32)
    output = tl.zeros([GROUP_HEADS, VALUES_PADDED], tl.float32)
    for start in range(split * ROWS, slots, splits * ROWS):
        slot = start + tl.arange(0, ROWS)
        number = tl.load(selected_ptr + token * slots + slot, mask=slot < slots, other=-1).to(tl.int64)
        there = number >= 0
        in_values, in_rotary = there[:, None] & is_value[None], there[:, None] & is_rotary[None]
        if PACKED_ROW == 0:
            row = rows_ptr + number[:, None] * (VALUES + ROTARY)
            values = tl.load(row + value[None], mask=in_values, other=0.0)
            rotaries = tl.load(row + VALUES + rotary[None], mask=in_rotary, other=0.0)
        else:
            groups_of_values: tl.constexpr = (VALUES + SCALED - 1) // SCALED
            row = rows_ptr + number * PACKED_ROW
            group = tl.arange(0, VALUES_PADDED // SCALED)
            scales = tl.load(
                (row + VALUES).to(tl.pointer_type(tl.float32))[:, None] + group[None],
                mask=there[:, None] & (group < groups_of_values)[None],
                other=0.0,
            )
            packed = tl.load(row[:, None] + value[None], mask=in_values, other=0)
            wide = packed.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            wide = tl.reshape(wide, [ROWS, VALUES_PADDED // SCALED, SCALED]) * scales[:, :, None]
            values = tl.reshape(wide.to(tl.bfloat16), [ROWS, VALUES_PADDED])
            rotaries = tl.load(
                (row + VALUES + 4 * groups_of_values).to(tl.pointer_type(tl.bfloat16))[:, None]
                + rotary[None],
                mask=in_rotary,
                other=0.0,
            )
        scores = tl.dot(query, tl.trans(values))
        scores = tl.dot(query_rotary, tl.trans(rotaries), scores)
        scores = tl.where(there[None], scores * scale_log2, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        probability = tl.exp2(scores - highest[:, None])
        factor = tl.exp2(maximum - highest)
        maximum = highest
        total = total * factor + tl.sum(probability, 1)
        output = tl.dot(probability.to(tl.bfloat16), values, output * factor[:, None])
    output = output / tl.where(total == 0, 1.0, total)[:, None]
    at = (token * splits + split) * HEADS + head
    in_output = is_head[:, None] & is_value[None]
    tl.store(
        output_ptr + at[:, None] * VALUES + value[None],
        output.to(output_ptr.dtype.element_ty),
        mask=in_output,
    )
    lse = tl.where(total == 0, float("-inf"), (maximum + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + at, lse, mask=is_head)


@triton.jit
def _combine(
    partial_ptr,
    partial_lse_ptr,
    output_ptr,
    lse_ptr,
    splits,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The splits' results of a head, [T, splits, H, V] and [T, splits, H], into one."""
    token, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    split, value = tl.arange(0, SPLITS), tl.arange(0, VALUES_PADDED)
    row = (token * splits + split) * HEADS + head
    lse = tl.load(partial_lse_ptr + row, mask=split < splits, other=float("-inf"))
    highest = tl.maximum(tl.max(lse), LOWEST)
    weight = tl.exp(lse - highest)
    total = tl.sum(weight)
    in_partial = (split < splits)[:, None] & (value < VALUES)[None]
    partial = tl.load(partial_ptr + row[:, None] * VALUES + value[None], mask=in_partial, other=0.0)
    output = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(
        output_ptr + tl.program_id(0).to(tl.int64) * VALUES + value,
        output.to(output_ptr.dtype.element_ty),
        mask=value < VALUES,
    )
    tl.store(lse_ptr + tl.program_id(0), tl.where(total == 0, float("-inf"), highest + tl.log(total)))
