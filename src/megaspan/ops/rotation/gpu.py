"""Rotary embedding on a GPU.

Angles are taken in float64, as everywhere. Each product and the sum of a rotation is rounded once (no fused
multiply-add), as in the compiled version, so all kernels that use `rotated` have the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TURNS_OF_PROGRAM = 128  # pairs of dimensions
STATES_OF_PROGRAM = 4096  # numbers: heads of one token
STATES_OF_WARP = 1024


def can_take(states: Tensor) -> bool:
    """Whether states [T, W] or [T, H, W] are on a GPU and of a dtype that is rotated there."""
    return states.is_cuda and states.dtype in (torch.float32, torch.bfloat16)


def turns_gpu(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions [T] int64, frequencies [width / 2] fp64 → [T, 2, width] fp32; see `turns`."""
    tokens, pairs = len(positions), len(frequencies)
    output = torch.empty(tokens, 2, 2 * pairs, device=positions.device)
    block = triton.next_power_of_2(pairs)
    together = max(TURNS_OF_PROGRAM // block, 1)
    _turns_kernel[(triton.cdiv(tokens, together),)](
        positions.long().contiguous(),
        frequencies,
        output,
        tokens,
        PAIRS=pairs,
        BLOCK=block,
        TOKENS=together,
        num_warps=4,
    )
    return output


def rotate_gpu(states: Tensor, turns: Tensor, out: Tensor | None = None) -> Tensor:
    """As `rotate`: states [T, W] or [T, H, W], turns [T, 2, rotary width] → the shape and dtype of `states`.

    out: where the result goes, which may be a view, say the end of each head's wider query.
    """
    tokens, width, rotary = states.shape[0], states.shape[-1], turns.shape[-1]
    if turns.shape != (tokens, 2, rotary) or rotary > width or turns.dtype != torch.float32:
        raise ValueError(f"states {list(states.shape)} and turns {list(turns.shape)} do not fit")
    result = torch.empty(states.shape, dtype=states.dtype, device=states.device) if out is None else out
    if result.shape != states.shape or result.dtype != states.dtype or result.stride(-1) != 1:
        raise ValueError(f"out {list(result.shape)} does not fit states {list(states.shape)}")
    states = states if states.stride(-1) == 1 else states.contiguous()
    heads = 1 if states.dim() == 2 else states.shape[1]
    block = triton.next_power_of_2(width)
    together = min(triton.next_power_of_2(heads), max(STATES_OF_PROGRAM // block, 1))
    _rotate_kernel[(tokens, triton.cdiv(heads, together))](
        states,
        turns.contiguous(),
        result,
        states.stride(0),
        states.stride(-2),
        result.stride(0),
        result.stride(-2),
        HEADS=heads,
        WIDTH=width,
        ROTARY=rotary,
        BLOCK=block,
        TOGETHER=together,
        num_warps=min(max(together * block // STATES_OF_WARP, 1), 4),
        enable_fp_fusion=False,
    )
    return result


@triton.jit
def _turns_kernel(
    positions_ptr,
    frequencies_ptr,
    output_ptr,
    tokens,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + token, mask=token < tokens, other=0)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < PAIRS, other=0.0)
    angle = position.to(tl.float64)[:, None] * frequency[None, :]
    cos, sin = tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)

    column = tl.arange(0, 2 * BLOCK)
    place = output_ptr + token[:, None] * (4 * PAIRS) + column[None, :]
    there = (token < tokens)[:, None] & (column < 2 * PAIRS)[None, :]
    tl.store(place, tl.reshape(tl.join(cos, cos), [TOKENS, 2 * BLOCK]), mask=there)
    tl.store(place + 2 * PAIRS, tl.reshape(tl.join(-sin, sin), [TOKENS, 2 * BLOCK]), mask=there)


@triton.jit
def rotated(states, turns_ptr, token, ROTARY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 states [ROWS, BLOCK] of one token: the first ROTARY of each row turned, the others as they are."""
    column = tl.arange(0, BLOCK)
    turning = column < ROTARY
    turn = tl.load(turns_ptr + token * (2 * ROTARY) + column, mask=turning, other=0.0)
    mirror_turn = tl.load(turns_ptr + token * (2 * ROTARY) + ROTARY + column, mask=turning, other=0.0)
    first, second = tl.split(tl.reshape(states, [ROWS, BLOCK // 2, 2]))
    mirrored = tl.reshape(tl.join(second, first), [ROWS, BLOCK])
    turned = states * turn[None, :] + mirrored * mirror_turn[None, :]
    return tl.where(turning[None, :], turned, states)


@triton.jit
def _rotate_kernel(
    states_ptr,
    turns_ptr,
    output_ptr,
    token_stride,
    head_stride,
    output_token_stride,
    output_head_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (head < HEADS) & (column < WIDTH)
    place = states_ptr + token * token_stride + head * head_stride + column
    states = tl.load(place, mask=there, other=0.0).to(tl.float32)
    result = rotated(states, turns_ptr, token, ROTARY, TOGETHER, BLOCK)
    tl.store(
        output_ptr + token * output_token_stride + head * output_head_stride + column, result, mask=there
    )
