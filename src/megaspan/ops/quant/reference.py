"""FP8 weight blocks, as plainly as they can be written."""

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weight [O, I] block by block; see `megaspan.ops.quant.quantize_blocks`."""
    if not torch.isfinite(weight).all():
        raise ValueError("a weight with NaN or infinity cannot be quantised")
    rows, columns = weight.shape
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale_inv = torch.ones(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            values = weight[block].float()
            if values.any():
                scale_inv[i, j] = max(values.abs().max().item() / E4M3_MAX, torch.finfo(torch.float32).tiny)
            quantized[block] = (values / scale_inv[i, j]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantized, scale_inv


def dequantize_blocks(quantized: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `quantize_blocks`; see `megaspan.ops.quant.dequantize_blocks`."""
    weight = torch.empty(quantized.shape, dtype=dtype)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            weight[block] = (quantized[block].float() * scale_inv[i, j]).to(dtype)
    return weight
