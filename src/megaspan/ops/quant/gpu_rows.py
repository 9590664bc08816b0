"""FP8 index rows and latent rows on a GPU: what kernels that quantise rows share, and that of the queries.

All are bit for bit what `index_rows` and `latent_rows` compute: the butterflies of the rotation add in the
same order, scales are exact or divided with correct rounding, and nothing depends on other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.quant.latent_rows import LARGEST
from megaspan.ops.quant.reference import E4M3_MAX

QUERY_ROWS = 4  # that one warp rotates at once
MAX_ = tl.constexpr(E4M3_MAX)
LARGEST_ = tl.constexpr(LARGEST)
TINY_ = tl.constexpr(torch.finfo(torch.float32).tiny)


def quantize_index_queries_gpu(query: Tensor, weights: Tensor, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """As `quantize_index_queries`: query [T, H, D] and weights [T, H] → e4m3 in bf16, and fp32 weights."""
    if weights.shape != query.shape[:2]:
        raise ValueError(f"query {list(query.shape)} and weights {list(weights.shape)} do not fit")
    query, weights = query.contiguous(), weights.contiguous()
    tokens, heads, width = query.shape
    output = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
    scaled_weights = torch.empty(weights.shape, device=query.device)
    _query_kernel[(triton.cdiv(tokens * heads, QUERY_ROWS),)](
        query,
        weights,
        output,
        scaled_weights,
        tokens * heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        STAGES=hadamard_stages(width, rotate),
        ROWS=QUERY_ROWS,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return output, scaled_weights


def hadamard_stages(width: int, rotate: bool) -> int:
    """Butterfly stages of a rotation: 0 without one, or where the width has none."""
    return width.bit_length() - 1 if rotate and width.bit_count() == 1 else 0


@triton.jit
def _query_kernel(
    query_ptr,
    weights_ptr,
    output_ptr,
    scaled_weights_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    place = row[:, None] * WIDTH + column
    there = (row < rows)[:, None] & (column < WIDTH)
    query = tl.load(query_ptr + place, mask=there, other=0.0).to(tl.float32)
    values, scale = index_quantized(query, ROWS, BLOCK, STAGES)
    weight = tl.load(weights_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(output_ptr + place, values.to(tl.float32), mask=there)
    tl.store(scaled_weights_ptr + row, weight * scale, mask=row < rows)


@triton.jit
def index_quantized(rows, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """fp32 rows [ROWS, BLOCK], rotated if STAGES, as e4m3 values and power-of-two scales [ROWS]."""
    if STAGES > 0:
        rows = rows * (BLOCK**-0.5)
    for _ in tl.static_range(STAGES):
        # Neighbours meet and their results part to the two halves, so that all pairs have met in the end
        # and every number is back in its place.
        left, right = tl.split(tl.reshape(rows, [ROWS, BLOCK // 2, 2]))
        halves = tl.permute(tl.join(left + right, left - right), [0, 2, 1])
        rows = tl.reshape(halves, [ROWS, BLOCK])
    largest = _largest_magnitude(rows)
    exponent = _scale_exponent(tl.where(largest == float("inf"), LARGEST_, largest))
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return to_e4m3(rows * inverse[:, None]), scale


@triton.jit
def _largest_magnitude(rows):
    """Of each row, NaN left out."""
    return tl.max(tl.where(rows == rows, tl.abs(rows), 0.0), 1)


@triton.jit
def _scale_exponent(largest):
    """The biased exponent of the least 2^k with largest <= 448 * 2^k, k >= -126; of 1 for 0."""
    bits = largest.to(tl.int32, bitcast=True)
    up = (bits & 0x7FFFFF) > 0x600000  # 448 is 1.75 * 2^8
    exponent = tl.maximum((bits >> 23) - 8 + up.to(tl.int32), 1)
    return tl.where(largest > 0, exponent, 127)


@triton.jit
def latent_quantized(groups):
    """fp32 numbers [GROUPS, 128] of a latent row as e4m3 values and scales [GROUPS]."""
    largest = tl.minimum(_largest_magnitude(groups), LARGEST_)
    scale = tl.where(largest > 0, tl.maximum(tl.div_rn(largest, tl.full([], MAX_, tl.float32)), TINY_), 1.0)
    return to_e4m3(tl.div_rn(groups, scale[:, None])), scale


@triton.jit
def to_e4m3(values):
    """fp32 values, limited to what e4m3 holds, NaN kept."""
    return tl.clamp(values, -MAX_, MAX_, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
