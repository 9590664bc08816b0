"""Routed experts for few tokens on a GPU, where the time is that of reading the experts' weights, once.

A program takes a pair of token and expert and some rows of the expert's weights, along the whole width. If it
is the first pair of its expert it computes the others with it; if not, it ends at once. So nothing is sorted.
Weights are the left operand of the products, whose tiles are at least 64 high; 16 states are wide enough.

Launches are chained: one starts while the programs of the one before it end, and waits for them before it
reads what they wrote. What they only read, as the experts' ids, was there before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megaspan.ops.moe.gpu_product import Operand, Tile, gated
from megaspan.ops.moe.gpu_routing import pairs_with
from megaspan.ops.quant.gpu_rows import latent_quantized

FEW_PAIRS = 512  # that a program can look through
LISTS = 16, 64, FEW_PAIRS  # lengths of the list of pairs, each compiled on its own
CHAINED = True
# One token with 8 experts of width 6144 and 2048 makes 256 programs, then 384: two and three on each of 132
# multiprocessors, all at once.
GATE_UP, DOWN = Tile(16, 64, 128, 3, 4), Tile(16, 128, 64, 4, 4)
# For FP8 columns and step are those of a scale.
FP8_GATE_UP, FP8_DOWN = Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 4, 4)


def tiles_of(gate_up: Operand) -> tuple[Tile, Tile]:
    """The tiles of both products."""
    return (GATE_UP, DOWN) if gate_up.scales is None else (FP8_GATE_UP, FP8_DOWN)


def pair_outputs_few(states: Operand, expert_ids: Tensor, gate_up: Operand, down: Operand) -> Tensor:
    """As `pair_outputs_many`, for at most FEW_PAIRS pairs."""
    (experts, width, inner_width), (tokens, slots) = down.values.shape, expert_ids.shape
    pairs = tokens * slots
    first, second = tiles_of(gate_up)
    inner = states.empty_states(pairs, inner_width)
    output = torch.empty(pairs, width, dtype=torch.bfloat16, device=expert_ids.device)
    sizes = {
        "WIDTH": width,
        "INNER": inner_width,
        "EXPERTS": experts,
        "PAIRS": next(length for length in LISTS if pairs <= length),
        "SCALED": states.scales is not None,
        "CHAINED": is_chained(expert_ids),
    }
    _gate_up_kernel[(triton.cdiv(inner_width, first.columns), pairs)](
        *states,
        gate_up.tiles(first.columns, first.step),
        gate_up.scales,
        expert_ids,
        *inner,
        states.values.stride(0),
        pairs,
        SLOTS=slots,
        **sizes,
        **first.launch(),
    )
    _down_kernel[(triton.cdiv(width, second.columns), pairs)](
        *inner,
        down.tiles(second.columns, second.step),
        down.scales,
        expert_ids,
        output,
        pairs,
        **sizes,
        **second.launch(),
        launch_pdl=is_chained(expert_ids),
    )
    return output


def is_chained(tensor: Tensor) -> bool:
    """Whether launches on this tensor's device can be chained."""
    return CHAINED and tensor.is_cuda


@triton.jit(do_not_specialize=["pairs"])
def _gate_up_kernel(
    states_ptr,
    scales_ptr,
    gate_up,
    weight_scales_ptr,
    ids_ptr,
    inner_ptr,
    inner_scales_ptr,
    states_stride,
    pairs,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
    CHAINED: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """inner [pairs, I] = silu(gate) * up."""
    if CHAINED:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    expert, pair, count = pairs_with(ids_ptr, tl.program_id(1), pairs, EXPERTS, PAIRS, TILE)
    if count > 0:
        there, step = tl.arange(0, TILE) < count, tl.arange(0, STEP)
        token = (pair // SLOTS).to(tl.int64)
        places = states_ptr + token[:, None] * states_stride + step[None, :]
        weight_row = expert * 2 * INNER + tile * COLUMNS
        groups: tl.constexpr = (WIDTH + STEP - 1) // STEP
        scale_place = weight_scales_ptr
        if SCALED:
            scale_place += weight_row.to(tl.int64) // COLUMNS * groups
        gate_sums, up_sums = tl.zeros([COLUMNS, TILE], tl.float32), tl.zeros([COLUMNS, TILE], tl.float32)
        for group in range(groups):
            start = group * STEP
            inside = there[:, None] & (step < WIDTH - start)[None, :]
            states = tl.load(places + start, mask=inside, other=0.0)
            gate = gate_up.load([weight_row, start])
            up = gate_up.load([weight_row + INNER, start])
            if SCALED:
                scale = tl.load(scales_ptr + token * groups + group, mask=there, other=0.0)[None, :]
                gate_scale = tl.load(scale_place + group)
                up_scale = tl.load(scale_place + INNER // COLUMNS * groups + group)
                gate_sums += tl.dot(gate, tl.trans(states)) * (scale * gate_scale)
                up_sums += tl.dot(up, tl.trans(states)) * (scale * up_scale)
            else:
                gate_sums = tl.dot(gate, tl.trans(states), gate_sums)
                up_sums = tl.dot(up, tl.trans(states), up_sums)
        inner = tl.trans(gated(gate_sums, up_sums))
        if SCALED:
            inner, scale = latent_quantized(inner)
            tl.store(inner_scales_ptr + pair * (INNER // COLUMNS) + tile, scale, mask=there)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = there[:, None] & (column < INNER)[None, :]
        tl.store(inner_ptr + pair[:, None] * INNER + column[None, :], inner, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    inner_ptr,
    scales_ptr,
    down,
    weight_scales_ptr,
    ids_ptr,
    output_ptr,
    pairs,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
    CHAINED: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """output [pairs, D]."""
    if CHAINED:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    expert, pair, count = pairs_with(ids_ptr, tl.program_id(1), pairs, EXPERTS, PAIRS, TILE)
    if count > 0:
        there, step = tl.arange(0, TILE) < count, tl.arange(0, STEP)
        places = inner_ptr + pair[:, None] * INNER + step[None, :]
        weight_row = expert * WIDTH + tile * COLUMNS
        if CHAINED:
            gdc_wait()
        groups: tl.constexpr = (INNER + STEP - 1) // STEP
        scale_place = weight_scales_ptr
        if SCALED:
            scale_place += (expert.to(tl.int64) * tl.cdiv(WIDTH, COLUMNS) + tile) * groups
        sums = tl.zeros([COLUMNS, TILE], tl.float32)
        for group in range(groups):
            start = group * STEP
            inside = there[:, None] & (step < INNER - start)[None, :]
            states = tl.load(places + start, mask=inside, other=0.0)
            weights = down.load([weight_row, start])
            if SCALED:
                scale = tl.load(scales_ptr + pair * groups + group, mask=there, other=0.0)[None, :]
                sums += tl.dot(weights, tl.trans(states)) * (scale * tl.load(scale_place + group))
            else:
                sums = tl.dot(weights, tl.trans(states), sums)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = there[:, None] & (column < WIDTH)[None, :]
        tl.store(output_ptr + pair[:, None] * WIDTH + column[None, :], tl.trans(sums), mask=inside)
