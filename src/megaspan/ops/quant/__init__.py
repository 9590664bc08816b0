"""FP8: weights in e4m3 with one float32 scale for each 128 x 128 block, index rows with one for each row.

The weights' format is that of the FP8 releases of DeepSeek-V3 and GLM-5: `weight = e4m3 * scale_inv`, the
scales in `weight_scale_inv`. Blocks at the right and lower edge may be partial. Rows: see `index_rows`.
"""

import torch
from torch import Tensor

from megaspan.ops.quant import vectorised
from megaspan.ops.quant.index_rows import dequantize_rows, hadamard, quantize_rows
from megaspan.ops.quant.reference import BLOCK

__all__ = [
    "BLOCK",
    "block_grid",
    "dequantize_blocks",
    "dequantize_rows",
    "hadamard",
    "quantize_blocks",
    "quantize_rows",
]

block_grid = vectorised.block_grid


def quantize_blocks(weight: Tensor, uniform_uneven: bool = False) -> tuple[Tensor, Tensor]:
    """Turn weight [O, I] of any float dtype into e4m3 [O, I] and scales fp32 [ceil(O/128), ceil(I/128)].

    The largest value of a block becomes 448, so each value keeps a relative error of at most 1/16, or
    an absolute one of scale / 1024 below 2^-6 of the scale. A block of zeros has scale 1.

    uniform_uneven: transformers has no block size when it dequantises, it divides the side of the weight
    by that of the grid, so 144 rows with two scales read as 72 and 72, not 128 and 16. True gives the
    blocks along such a side one scale, which both readings understand.

    Raises ValueError for a weight that holds NaN or infinity.
    """
    scale_inv = vectorised.block_scales(weight)
    if uniform_uneven:
        for side in (0, 1):
            if weight.shape[side] % BLOCK:
                scale_inv = scale_inv.amax(side, keepdim=True).expand(scale_inv.shape).contiguous()
    return vectorised.quantize_with(weight, scale_inv), scale_inv


def dequantize_blocks(quantized: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn e4m3 [O, I] and its scales [ceil(O/128), ceil(I/128)] back into a weight [O, I] of `dtype`.

    Raises ValueError when the grid of scales does not fit the weight.
    """
    return vectorised.dequantize_blocks(quantized, scale_inv, dtype)
