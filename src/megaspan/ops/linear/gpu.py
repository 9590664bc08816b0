"""Batch-invariant products with bf16 weight matrices on a GPU, of few tokens at the speed of memory.

The smallest matrix instruction has 64 rows for tokens. Where there are no more, a program streams few columns
along the whole width, so that there are enough programs, all at once, to keep the memory busy.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.linear.gpu_tiles import (
    PROCESSORS,
    Tile,
    is_aligned,
    place_of,
    product,
    states_descriptor,
    store,
    tile_of,
    weights_descriptor,
)

FEW_TOKENS = 64  # that the smallest instruction takes at once

# Two programs of a few-token tile fit on a multiprocessor, so that one loads while the other begins or ends.
FEW = (Tile(64, 64, 128, 3, 4), Tile(64, 32, 128, 4, 4), Tile(64, 16, 128, 5, 4))
MANY = (
    Tile(128, 256, 64, 4, 8),
    Tile(128, 128, 64, 5, 8),
    Tile(128, 64, 64, 4, 4),
    Tile(64, 64, 128, 3, 4),
    Tile(64, 32, 128, 4, 4),
)
# Of two weights at once, each with these columns.
FEW_GATED = (Tile(64, 64, 128, 2, 4), Tile(64, 32, 128, 3, 4), Tile(64, 16, 128, 4, 4))
MANY_GATED = (Tile(128, 128, 64, 4, 8), Tile(128, 64, 64, 3, 8), Tile(64, 32, 128, 3, 4))


def chosen_tile(few: Sequence[Tile], many: Sequence[Tile], tokens: int, columns: int, heads: int = 1) -> Tile:
    """The tile for so many tokens; a program alone on a multiprocessor has twice the loads under way."""
    if tokens > FEW_TOKENS:
        return tile_of(many, tokens, columns, heads)
    tile = tile_of(few, tokens, columns, heads)
    alone = tile.programs(tokens, columns, heads) <= PROCESSORS
    return tile._replace(stages=2 * tile.stages) if alone else tile


def can_take(states: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels compute these operands: bf16 on a Hopper GPU or later, without gradients.

    This must not depend on how many tokens there are, or where: weights are copied to the chip in rows that
    begin at multiples of 16 bytes; states that do not are moved first.
    """
    tensors = (states, *weights)
    return (
        states.is_cuda
        and all(tensor.dtype == torch.bfloat16 and tensor.device == states.device for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and torch.cuda.get_device_capability(states.device) >= (9, 0)
        and states.shape[-1] % 8 == 0
        and all(weight.numel() and is_aligned(weight) for weight in weights)
    )


def linear_gpu(
    states: Tensor, weight: Tensor, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None
) -> Tensor:
    """states [T, I] times weight [O, I] transposed → [T, O] in `dtype`, bf16 or fp32."""
    return _product(states[:, None], weight[None], False, dtype, tile)[:, 0]


def head_linear_gpu(states: Tensor, weights: Tensor, tile: Tile | None = None) -> Tensor:
    """For each head: states [T, H, I] times weights [H, O, I] transposed → [T, H, O]."""
    return _product(states, weights, False, torch.bfloat16, tile)


def head_combine_gpu(states: Tensor, weights: Tensor, tile: Tile | None = None) -> Tensor:
    """For each head: states [T, H, I] times weights [H, I, O] → [T, H, O]."""
    return _product(states, weights, True, torch.bfloat16, tile)


def gate_up_gpu(states: Tensor, gate: Tensor, up: Tensor, tile: Tile | None = None) -> Tensor:
    """silu(gate [I, D] of states [T, D]) * (up [I, D] of them) → [T, I], rounded where PyTorch rounds."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} do not fit")
    _require_fit(states, gate, gate.shape[1])
    (tokens, width), inner = states.shape, len(gate)
    output = torch.empty(tokens, inner, dtype=torch.bfloat16, device=states.device)
    if not tokens:
        return output
    tile = tile or chosen_tile(FEW_GATED, MANY_GATED, tokens, inner)
    _gate_up_kernel[(tile.programs(tokens, inner),)](
        states_descriptor(states[:, None], tile),
        weights_descriptor(gate[None], tile),
        weights_descriptor(up[None], tile),
        output,
        tokens,
        inner,
        WIDTH=width,
        **tile.launch(),
    )
    return output


def _product(
    states: Tensor, weights: Tensor, transposed: bool, dtype: torch.dtype, tile: Tile | None
) -> Tensor:
    """states [T, H, I], weights [H, O, I], or transposed [H, I, O] → [T, H, O]."""
    width, columns = weights.shape[1:] if transposed else weights.shape[:0:-1]
    _require_fit(states, weights, width)
    tokens, heads, _ = states.shape
    output = torch.empty(tokens, heads, columns, dtype=dtype, device=states.device)
    if not output.numel():
        return output
    tile = tile or chosen_tile(FEW, MANY, tokens, columns, heads)
    _product_kernel[(tile.programs(tokens, columns), heads)](
        states_descriptor(states, tile),
        weights_descriptor(weights, tile, transposed),
        output,
        tokens,
        columns,
        heads,
        WIDTH=width,
        TRANSPOSED=transposed,
        **tile.launch(),
    )
    return output


def _require_fit(states: Tensor, weights: Tensor, width: int) -> None:
    heads_fit = weights.dim() == 2 or len(weights) == states.shape[1]
    if states.shape[-1] != width or not heads_fit:
        raise ValueError(f"states {list(states.shape)} and weights {list(weights.shape)} do not fit")


@triton.jit(do_not_specialize=["tokens"])
def _product_kernel(
    states,
    weights,
    output_ptr,
    tokens,
    columns,
    heads,
    WIDTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    """output [T, H, O]."""
    head = tl.program_id(1)
    token, column = place_of(tl.program_id(0), tokens, columns, TOKENS, COLUMNS, BAND)
    sums = product(states, weights, head, token, column, WIDTH, TRANSPOSED, TOKENS, COLUMNS, STEP)
    output_ptr += head.to(tl.int64) * columns
    store(output_ptr, sums, token, column, tokens, columns, heads * columns, TOKENS, COLUMNS)


@triton.jit(do_not_specialize=["tokens"])
def _gate_up_kernel(
    states,
    gate,
    up,
    output_ptr,
    tokens,
    inner,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    """output [T, I]."""
    token, column = place_of(tl.program_id(0), tokens, inner, TOKENS, COLUMNS, BAND)
    gate_sums, up_sums = tl.zeros([TOKENS, COLUMNS], tl.float32), tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, STEP):
        some = states.load([0, token, start]).reshape(TOKENS, STEP)
        gate_rows = gate.load([0, column, start]).reshape(COLUMNS, STEP)
        up_rows = up.load([0, column, start]).reshape(COLUMNS, STEP)
        gate_sums = tl.dot(some, gate_rows.T, gate_sums)
        up_sums = tl.dot(some, up_rows.T, up_sums)
    wide = gate_sums.to(tl.bfloat16).to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(tl.bfloat16).to(tl.float32)
    gated = activated * up_sums.to(tl.bfloat16).to(tl.float32)
    store(output_ptr, gated, token, column, tokens, inner, inner, TOKENS, COLUMNS)
