"""Index rows in FP8: a Hadamard rotation, then e4m3 values with one float32 scale for each row.

The rows of DeepSeek-V3.2's lightning indexer, which GLM-5.2 keeps (arXiv 2512.02556): 128 values and a
scale make 132 bytes. The rotation of query and key leaves their dot product as it is and spreads what a few
large dimensions hold over all of them, so that the rounding of those few does not decide the score.
"""

import torch
from torch import Tensor

from megaspan.ops.quant.reference import E4M3_MAX

LEAST_EXPONENT = -126  # of a float32 that is not subnormal


def hadamard(states: Tensor) -> Tensor:
    """Multiply states [..., D] of any float dtype by the orthonormal D x D Hadamard matrix, in float32.

    The matrix (Sylvester's order, scaled by D^-0.5) is symmetric and its own inverse. The result has the
    dtype of `states`. Raises ValueError unless D is a power of two.
    """
    width = states.shape[-1]
    if width.bit_count() != 1:
        raise ValueError(f"a Hadamard rotation needs a width that is a power of two, not {width}")
    mixed = states.float() * width**-0.5
    half = 1
    while half < width:
        left, right = mixed.unflatten(-1, (width // (2 * half), 2, half)).unbind(-2)
        mixed = torch.stack((left + right, left - right), -2).flatten(-3)
        half *= 2
    return mixed.to(states.dtype)


def quantize_rows(states: Tensor, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """Turn states [N, D] of any float dtype into e4m3 [N, D] and scales fp32 [N].

    A scale is the smallest power of two that brings the row within 448; that of a row of zeros is 1. With
    `rotate` the rows are rotated first, and so must be whatever they are multiplied with.

    Raises ValueError for states that hold NaN or infinity, and, to rotate, for a D that is no power of two.
    """
    rows = hadamard(states.float()) if rotate else states.float()
    largest = rows.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise ValueError("a row with NaN or infinity cannot be quantised")
    scale = _power_of_two_scale(largest)
    scaled = (rows / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def dequantize_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Turn e4m3 [N, D] and scales fp32 [N] back into fp32 [N, D]; rotated rows stay rotated.

    `hadamard` of the result undoes the rotation. Raises ValueError when the scales do not fit the rows.
    """
    if scale.shape != values.shape[:1]:
        raise ValueError(f"scales {tuple(scale.shape)} do not fit rows {tuple(values.shape)}")
    return values.float() * scale[:, None]


def _power_of_two_scale(largest: Tensor) -> Tensor:
    """The least 2^k with largest <= 448 * 2^k, without the rounding of a division; 1 for 0."""
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1), and 448 is 0.875 * 2^9
    exponent = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8).clamp(min=LEAST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent).where(largest > 0, 1.0)
