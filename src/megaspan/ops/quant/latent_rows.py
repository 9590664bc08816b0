"""Latent rows in FP8: e4m3 values with one float32 scale for each 128 of them, the rotary part in bf16.

The row of DeepSeek-V3.2's FP8 cache: 512 values, 4 scales and 64 rotary numbers make 656 bytes. The rotary
part is small, and rounding it would blur positions, so it keeps 16 bits. A field of a row of odd size need
not be aligned: rows are read by copying their bytes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.ops.quant.reference import E4M3_MAX

GROUP = 128  # values that share a scale; the last group of a row may be partial
LARGEST = 2.0**127  # what is larger, infinity too, is stored as this much


def latent_row_bytes(latent_rank: int, rope_width: int) -> int:
    """Bytes of one FP8 latent row: values, scales, rotary part."""
    return latent_rank + 4 * scale_count(latent_rank) + 2 * rope_width


def scale_count(latent_rank: int) -> int:
    """How many groups of 128 values a row has."""
    return -(-latent_rank // GROUP)


def encode_latent_rows(rows: Tensor, latent_rank: int) -> Tensor:
    """Turn rows [T, latent_rank + rope_width] of any float dtype into bytes uint8 [T, latent_row_bytes].

    The largest value of a group becomes 448; a group of zeros has scale 1. Nothing is refused, as serving
    must not stop for one bad number: NaN stays NaN, infinity saturates. A row's bytes depend on no other.
    """
    latent, rope = rows[:, :latent_rank].float(), rows[:, latent_rank:].bfloat16()
    groups = scale_count(latent_rank)
    padded_TGV = F.pad(latent, (0, groups * GROUP - latent_rank)).unflatten(1, (groups, GROUP))
    largest_TG = largest_magnitude(padded_TGV).clamp_(max=LARGEST)
    # By a tensor: on a GPU, division by a number is multiplication with its inverse, which rounds otherwise.
    scale_TG = largest_TG / torch.full_like(largest_TG, E4M3_MAX)
    scale_TG = scale_TG.clamp_(min=torch.finfo(torch.float32).tiny).where(largest_TG > 0, 1.0)
    scaled_TGV = (padded_TGV / scale_TG[..., None]).clamp_(-E4M3_MAX, E4M3_MAX)
    values = scaled_TGV.flatten(1)[:, :latent_rank].to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((values, copied_as(scale_TG, torch.uint8), copied_as(rope, torch.uint8)), 1)


def decode_latent_rows(
    packed: Tensor, latent_rank: int, rope_width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Turn bytes uint8 [N, latent_row_bytes] back into rows [N, latent_rank + rope_width] of `dtype`.

    Raises ValueError when rows of these widths have another number of bytes.
    """
    if packed.shape[1] != latent_row_bytes(latent_rank, rope_width):
        widths = f"{latent_rank} FP8 values and {rope_width} bf16"
        raise ValueError(f"rows of {packed.shape[1]} bytes do not fit {widths}")
    values, scales, rope = packed.split((latent_rank, 4 * scale_count(latent_rank), 2 * rope_width), 1)
    latent = values.view(torch.float8_e4m3fn).float()
    scale_NG = copied_as(scales, torch.float32)
    for group, scale_N1 in zip(latent.split(GROUP, 1), scale_NG.split(1, 1), strict=True):
        group.mul_(scale_N1)
    return torch.cat((latent.to(dtype), copied_as(rope, torch.bfloat16).to(dtype)), 1)


def largest_magnitude(values: Tensor) -> Tensor:
    """[..., D] → [...]: the largest of each row in magnitude, NaN left out."""
    return values.abs().nan_to_num_(nan=0.0, posinf=math.inf).amax(-1)


def copied_as(field: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [N, C] of one dtype as those of another with the same bytes, copied to aligned memory."""
    aligned = field.clone(memory_format=torch.contiguous_format).flatten()
    return aligned.view(dtype).view(len(field), field.shape[1] * field.itemsize // dtype.itemsize)
