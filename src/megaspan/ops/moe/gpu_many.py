"""Routed experts for many tokens on a GPU: two grouped products over pairs that are sorted by expert.

A program computes one tile: some pairs of one expert times some columns. The last pairs of an expert, where
they fill no more than half of a tile, make half a tile. Every number is one chain of products along the
width, in its order, whatever the tile and its other pairs are: a token's numbers do not depend on others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.moe.gpu_product import Operand, Tile, gated
from megaspan.ops.moe.gpu_routing import sort_pairs, tile_of
from megaspan.ops.quant.gpu_rows import latent_quantized

# For bf16: 128 x 256 sums are 128 registers of each of 256 threads, and 4 steps fill the shared memory.
GATE_UP, DOWN = Tile(128, 128, 64, 4, 8), Tile(128, 256, 64, 4, 8)
# For FP8 a product needs registers of its own before it is scaled; columns and step are those of a scale.
FP8_GATE_UP, FP8_DOWN = Tile(128, 128, 128, 4, 8), Tile(128, 128, 128, 4, 8)


def tiles_of(gate_up: Operand) -> tuple[Tile, Tile]:
    """The tiles of both products."""
    return (GATE_UP, DOWN) if gate_up.scales is None else (FP8_GATE_UP, FP8_DOWN)


def pair_outputs_many(states: Operand, expert_ids: Tensor, gate_up: Operand, down: Operand) -> Tensor:
    """states [T, D], expert_ids [T, k] → the output of each (token, expert) pair, [T k, D] bf16.

    gate_up: [E, 2 I, D]; down: [E, D, I]. See `moe_gpu`. Pairs without an expert are not written.
    """
    (experts, width, inner_width), (tokens, slots) = down.values.shape, expert_ids.shape
    pairs = tokens * slots
    order, starts = sort_pairs(expert_ids, experts)
    first, second = tiles_of(gate_up)
    inner = states.empty_states(pairs, inner_width)
    output = torch.empty(pairs, width, dtype=torch.bfloat16, device=expert_ids.device)
    sizes = {
        "WIDTH": width,
        "INNER": inner_width,
        "EXPERTS": experts,
        "BINS": triton.next_power_of_2(experts),
        "SCALED": states.scales is not None,
    }
    _gate_up_kernel[_grid(pairs, experts, inner_width, first)](
        states.values,
        states.scales,
        gate_up.tiles(first.columns, first.step),
        gate_up.scales,
        order,
        starts,
        *inner,
        states.values.stride(0),
        SLOTS=slots,
        **sizes,
        **first.launch(),
    )
    _down_kernel[_grid(pairs, experts, width, second)](
        inner.tiles(second.states, second.step),
        inner.tiles(second.states // 2, second.step),
        inner.scales,
        down.tiles(second.columns, second.step),
        down.scales,
        order,
        starts,
        output,
        **sizes,
        **second.launch(),
    )
    return output


def _grid(pairs: int, experts: int, columns: int, tile: Tile) -> tuple[int]:
    """Programs for the largest number of tiles that so many pairs can make."""
    return ((pairs // tile.states + min(pairs, experts)) * triton.cdiv(columns, tile.columns),)


@triton.jit
def _gate_up_kernel(
    states_ptr,
    scales_ptr,
    gate_up,
    weight_scales_ptr,
    order_ptr,
    starts_ptr,
    inner_ptr,
    inner_scales_ptr,
    states_stride,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """inner [sorted pairs, I] = silu(gate) * up."""
    column_tiles: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    expert, first, count, tile = tile_of(starts_ptr, tl.program_id(0), column_tiles, EXPERTS, BINS, TILE)
    if count > TILE // 2:
        _gate_up_tile(
            states_ptr, scales_ptr, gate_up, weight_scales_ptr, order_ptr, inner_ptr, inner_scales_ptr,
            states_stride, expert, first, count, tile, SLOTS, WIDTH, INNER, SCALED, TILE, COLUMNS, STEP,
        )  # fmt: skip
    elif count > 0:
        _gate_up_tile(
            states_ptr, scales_ptr, gate_up, weight_scales_ptr, order_ptr, inner_ptr, inner_scales_ptr,
            states_stride, expert, first, count, tile, SLOTS, WIDTH, INNER, SCALED, TILE // 2, COLUMNS, STEP,
        )  # fmt: skip


@triton.jit
def _gate_up_tile(
    states_ptr, scales_ptr, gate_up, weight_scales_ptr, order_ptr, inner_ptr, inner_scales_ptr, states_stride,
    expert, first, count, tile,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, SCALED: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row, step = tl.arange(0, TILE), tl.arange(0, STEP)
    # Rows past the last pair repeat the first one.
    token = (tl.load(order_ptr + first + tl.where(row < count, row, 0)) // SLOTS).to(tl.int64)
    places = states_ptr + token[:, None] * states_stride + step[None, :]
    weight_row = expert * 2 * INNER + tile * COLUMNS
    groups: tl.constexpr = (WIDTH + STEP - 1) // STEP
    scale_place = weight_scales_ptr
    if SCALED:
        scale_place += weight_row.to(tl.int64) // COLUMNS * groups
    gate_sums, up_sums = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
    for group in range(groups):
        start = group * STEP
        if WIDTH % STEP == 0:
            states = tl.load(places + start)
        else:
            states = tl.load(places + start, mask=(step < WIDTH - start)[None, :], other=0.0)
        gate = gate_up.load([weight_row, start])
        up = gate_up.load([weight_row + INNER, start])
        if SCALED:
            scale = tl.load(scales_ptr + token * groups + group)[:, None]
            gate_scale = tl.load(scale_place + group)
            up_scale = tl.load(scale_place + INNER // COLUMNS * groups + group)
            gate_sums += tl.dot(states, tl.trans(gate)) * (scale * gate_scale)
            up_sums += tl.dot(states, tl.trans(up)) * (scale * up_scale)
        else:
            gate_sums = tl.dot(states, tl.trans(gate), gate_sums)
            up_sums = tl.dot(states, tl.trans(up), up_sums)
    inner = gated(gate_sums, up_sums)
    row_place, column = (first + row).to(tl.int64), tile * COLUMNS + tl.arange(0, COLUMNS)
    if SCALED:
        inner, scale = latent_quantized(inner)
        tl.store(inner_scales_ptr + row_place * (INNER // COLUMNS) + tile, scale, mask=row < count)
    there = (row < count)[:, None] & (column < INNER)[None, :]
    tl.store(inner_ptr + row_place[:, None] * INNER + column[None, :], inner, mask=there)


@triton.jit
def _down_kernel(
    inner,
    half_inner,
    scales_ptr,
    down,
    weight_scales_ptr,
    order_ptr,
    starts_ptr,
    output_ptr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """output [pairs, D], each at the pair's number."""
    column_tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    expert, first, count, tile = tile_of(starts_ptr, tl.program_id(0), column_tiles, EXPERTS, BINS, TILE)
    if count > TILE // 2:
        _down_tile(
            inner, scales_ptr, down, weight_scales_ptr, order_ptr, output_ptr,
            expert, first, count, tile, WIDTH, INNER, SCALED, TILE, COLUMNS, STEP,
        )  # fmt: skip
    elif count > 0:
        _down_tile(
            half_inner, scales_ptr, down, weight_scales_ptr, order_ptr, output_ptr,
            expert, first, count, tile, WIDTH, INNER, SCALED, TILE // 2, COLUMNS, STEP,
        )  # fmt: skip


@triton.jit
def _down_tile(
    inner, scales_ptr, down, weight_scales_ptr, order_ptr, output_ptr, expert, first, count, tile,
    WIDTH: tl.constexpr, INNER: tl.constexpr, SCALED: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, TILE), tile * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = expert * WIDTH + tile * COLUMNS
    groups: tl.constexpr = (INNER + STEP - 1) // STEP
    row_place = (first + tl.where(row < count, row, 0)).to(tl.int64)
    scale_place = weight_scales_ptr
    if SCALED:
        scale_place += (expert.to(tl.int64) * tl.cdiv(WIDTH, COLUMNS) + tile) * groups
    sums = tl.zeros([TILE, COLUMNS], tl.float32)
    for group in range(groups):
        states = inner.load([first, group * STEP])
        weights = down.load([weight_row, group * STEP])
        if SCALED:
            scale = tl.load(scales_ptr + row_place * groups + group)[:, None] * tl.load(scale_place + group)
            sums += tl.dot(states, tl.trans(weights)) * scale
        else:
            sums = tl.dot(states, tl.trans(weights), sums)
    pair = tl.load(order_ptr + row_place).to(tl.int64)
    there = (row < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(output_ptr + pair[:, None] * WIDTH + column[None, :], sums, mask=there)
