"""FP8: weights in e4m3 with one float32 scale for each 128 x 128 block, and the rows of the cache.

The weights' format is that of the FP8 releases of DeepSeek-V3 and GLM-5: `weight = e4m3 * scale_inv`, the
scales in `weight_scale_inv`. Blocks at the right and lower edge may be partial. Rows: see `latent_rows`
and `index_rows`.
"""

import torch
from torch import Tensor

from megaspan.ops.quant import index_rows, latent_rows, native, vectorised
from megaspan.ops.quant.index_rows import (
    decode_index_rows,
    dequantize_rows,
    hadamard,
    quantize_rows,
    split_index_rows,
)
from megaspan.ops.quant.latent_rows import decode_latent_rows, latent_row_bytes
from megaspan.ops.quant.reference import BLOCK

__all__ = [
    "BLOCK",
    "block_grid",
    "decode_index_rows",
    "decode_latent_rows",
    "dequantize_blocks",
    "dequantize_rows",
    "encode_index_rows",
    "encode_latent_rows",
    "hadamard",
    "latent_row_bytes",
    "quantize_blocks",
    "quantize_index_queries",
    "quantize_rows",
    "split_index_rows",
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


def encode_latent_rows(rows: Tensor, latent_rank: int) -> Tensor:
    """Turn latent rows [T, W] of any float dtype into bytes uint8 [T, B]; see `latent_rows`."""
    version = native if native.supports(rows) else latent_rows
    return version.encode_latent_rows(rows, latent_rank)


def encode_index_rows(keys: Tensor, rotate: bool = True) -> Tensor:
    """Turn index keys [T, D] of any float dtype into bytes uint8 [T, D + 4]; see `index_rows`."""
    version = native if native.supports(keys) else index_rows
    return version.encode_index_rows(keys, rotate)


def quantize_index_queries(query: Tensor, weights: Tensor, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """Round queries [T, H, D] to e4m3 in bf16, their scales folded into weights [T, H]; see `index_rows`."""
    version = native if native.supports(query) else index_rows
    return version.quantize_index_queries(query, weights, rotate)
