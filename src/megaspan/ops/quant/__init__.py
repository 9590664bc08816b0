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
    index_row_views,
    load_index_rows,
    quantize_rows,
    require_pages,
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
    "encode_latent_rows",
    "hadamard",
    "index_row_views",
    "latent_row_bytes",
    "load_index_rows",
    "quantize_blocks",
    "quantize_index_queries",
    "quantize_rows",
    "require_pages",
    "store_index_rows",
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
    if weight.is_cuda and not (uniform_uneven and any(side % BLOCK for side in weight.shape)):
        from megaspan.ops.quant import gpu_blocks

        if weight.dtype in gpu_blocks.DTYPES:
            return gpu_blocks.quantize_blocks_gpu(weight)
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
    if quantized.is_cuda:
        from megaspan.ops.quant.gpu_blocks import dequantize_blocks_gpu

        return dequantize_blocks_gpu(quantized, scale_inv, dtype)
    return vectorised.dequantize_blocks(quantized, scale_inv, dtype)


def encode_latent_rows(rows: Tensor, latent_rank: int) -> Tensor:
    """Turn latent rows [T, W] of any float dtype into bytes uint8 [T, B]; see `latent_rows`."""
    version = native if native.supports(rows) else latent_rows
    return version.encode_latent_rows(rows, latent_rank)


def store_index_rows(
    keys: Tensor, storage: Tensor, places: Tensor, page_size: int, rotate: bool = True
) -> None:
    """Round index keys [T, D] to the rows `places` [T] of uint8 storage [N, D + 4]; see `index_rows`."""
    if keys.shape != (len(places), storage.shape[1] - 4):
        raise ValueError(
            f"keys {list(keys.shape)} do not fit {len(places)} places in storage {list(storage.shape)}"
        )
    version = native if native.supports(keys) else index_rows
    version.store_index_rows(keys, storage, places, page_size, rotate)


def quantize_index_queries(query: Tensor, weights: Tensor, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """Round queries [T, H, D] to e4m3 in bf16, their scales folded into weights [T, H]; see `index_rows`."""
    if query.is_cuda:
        from megaspan.ops.quant.gpu_rows import quantize_index_queries_gpu

        return quantize_index_queries_gpu(query, weights, rotate)
    version = native if native.supports(query) else index_rows
    return version.quantize_index_queries(query, weights, rotate)
