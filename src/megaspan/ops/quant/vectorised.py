"""FP8 weight blocks, all blocks of a weight at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.ops.quant.reference import BLOCK, E4M3_MAX


def block_grid(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales of a weight [rows, columns]; the last blocks may be partial."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def block_scales(weight: Tensor) -> Tensor:
    """Scales [ceil(O / 128), ceil(I / 128)] fp32 that bring the largest value of each block to 448."""
    rows, columns = block_grid(*weight.shape)
    padding = (0, columns * BLOCK - weight.shape[1], 0, rows * BLOCK - weight.shape[0])
    of_rows = F.pad(weight, padding).abs().view(-1, columns, BLOCK).amax(-1)  # [rows * 128, columns]
    largest = of_rows.view(rows, BLOCK, columns).amax(1).float()
    if not torch.isfinite(largest).all():
        raise ValueError("a weight with NaN or infinity cannot be quantised")
    # By a tensor: on a GPU, division by a number is multiplication with its inverse, which rounds otherwise.
    scales = (largest / torch.full_like(largest, E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    return scales.where(largest > 0, 1.0)


def quantize_with(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """Divide weight [O, I] by the scales of its blocks and round to e4m3, nearest even."""
    scaled = weight.float() / _per_element(scale_inv, weight.shape)
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize_blocks(quantized: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply e4m3 values [O, I] with the scales of their blocks."""
    if scale_inv.shape != block_grid(*quantized.shape):
        raise ValueError(f"scales {tuple(scale_inv.shape)} do not fit a weight {tuple(quantized.shape)}")
    return quantized.float().mul_(_per_element(scale_inv.float(), quantized.shape)).to(dtype)


def _per_element(scales: Tensor, shape: torch.Size) -> Tensor:
    rows, columns = scales.shape
    blocks = scales[:, None, :, None].expand(rows, BLOCK, columns, BLOCK)
    return blocks.reshape(rows * BLOCK, columns * BLOCK)[: shape[0], : shape[1]]
