"""FP8 weight blocks on a GPU: one program for each block of 128 x 128, the same bits as `vectorised`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.quant.gpu_rows import MAX_, TINY_, to_e4m3
from megaspan.ops.quant.reference import BLOCK
from megaspan.ops.quant.vectorised import block_grid

BLOCK_ = tl.constexpr(BLOCK)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_blocks_gpu(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_blocks`: weight [O, I] → e4m3 [O, I] and scales. Waits for the result, to refuse NaN."""
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    grid = block_grid(*weight.shape)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale_inv = torch.empty(grid, device=weight.device)
    _quantize_kernel[grid](
        weight, quantized, scale_inv, *weight.shape, weight.stride(0), num_warps=8, enable_fp_fusion=False
    )
    if not torch.isfinite(scale_inv).all():
        raise ValueError("a weight with NaN or infinity cannot be quantised")
    return quantized, scale_inv


def dequantize_blocks_gpu(quantized: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dequantize_blocks`: e4m3 [O, I] and its scales → weight [O, I] of `dtype`."""
    grid = block_grid(*quantized.shape)
    if scale_inv.shape != grid:
        raise ValueError(f"scales {tuple(scale_inv.shape)} do not fit a weight {tuple(quantized.shape)}")
    quantized = quantized if quantized.stride(1) == 1 else quantized.contiguous()
    weight = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    _dequantize_kernel[grid](
        quantized, scale_inv.contiguous(), weight, *weight.shape, quantized.stride(0), num_warps=8
    )
    return weight


@triton.jit
def _block(rows, columns):
    """This program's row and column numbers, int64, and which of them are in the weight."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ + tl.arange(0, BLOCK_)[:, None]
    column = tl.program_id(1) * BLOCK_ + tl.arange(0, BLOCK_)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _quantize_kernel(weight_ptr, quantized_ptr, scales_ptr, rows, columns, stride):
    row, column, there = _block(rows, columns)
    weight = tl.load(weight_ptr + row * stride + column, mask=there, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(weight == weight, tl.abs(weight), float("inf")))
    scale = tl.where(largest > 0, tl.maximum(tl.div_rn(largest, tl.full([], MAX_, tl.float32)), TINY_), 1.0)
    quantized = to_e4m3(tl.div_rn(weight, tl.full(weight.shape, 0.0, tl.float32) + scale))
    tl.store(quantized_ptr + row * columns + column, quantized, mask=there)
    tl.store(scales_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)


@triton.jit
def _dequantize_kernel(quantized_ptr, scales_ptr, weight_ptr, rows, columns, stride):
    row, column, there = _block(rows, columns)
    scale = tl.load(scales_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.float32)
    quantized = tl.load(quantized_ptr + row * stride + column, mask=there, other=0.0)
    tl.store(weight_ptr + row * columns + column, quantized.to(tl.float32) * scale, mask=there)
