"""Index rows in FP8: a Hadamard rotation, then e4m3 values with one float32 scale for each row.

The rows of DeepSeek-V3.2's lightning indexer, which GLM-5.2 keeps (arXiv 2512.02556): 128 values and a
scale make 132 bytes. The rotation of query and key leaves their dot product as it is and spreads what a few
large dimensions hold over all of them, so that the rounding of those few does not decide the score.

Rows lie in pages: first the values of all rows of the page, then their scales. So a row's values begin at a
multiple of their own width, and hardware that loads 16 bytes at a time can load them.
"""

import torch
from torch import Tensor

from megaspan.ops.quant.latent_rows import LARGEST, largest_magnitude
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
    if not torch.isfinite(rows).all():
        raise ValueError("a row with NaN or infinity cannot be quantised")
    scaled, scale = _scaled(rows)
    return scaled.to(torch.float8_e4m3fn), scale


def dequantize_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Turn e4m3 [N, D] and scales fp32 [N] back into fp32 [N, D]; rotated rows stay rotated.

    `hadamard` of the result undoes the rotation. Raises ValueError when the scales do not fit the rows.
    """
    if scale.shape != values.shape[:1]:
        raise ValueError(f"scales {tuple(scale.shape)} do not fit rows {tuple(values.shape)}")
    return values.float() * scale[:, None]


def require_pages(storage: Tensor, page_size: int) -> None:
    """ValueError where storage uint8 [N, D + 4] is not contiguous whole pages whose scales are aligned."""
    rows, width = len(storage), storage.shape[1] - 4
    if not storage.is_contiguous() or rows % page_size:
        raise ValueError(f"{rows} FP8 index rows must be contiguous, and whole pages of {page_size}")
    if page_size * width % 4:
        raise ValueError(
            f"a page of FP8 index rows needs values that are a multiple of 4, not {page_size} x {width}: "
            "choose another page size"
        )


def index_row_views(storage: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Storage of FP8 rows as what it holds: e4m3 values [P, page_size, D] and fp32 scales [P, page_size].

    storage: uint8 [P * page_size, D + 4]. Raises ValueError as `require_pages`.
    """
    require_pages(storage, page_size)
    width = storage.shape[1] - 4
    pages = storage.view(len(storage) // page_size, page_size * (width + 4))
    values, scales = pages.split((page_size * width, page_size * 4), 1)
    return values.view(torch.float8_e4m3fn).unflatten(1, (page_size, width)), scales.view(torch.float32)


def store_index_rows(
    keys: Tensor, storage: Tensor, places: Tensor, page_size: int, rotate: bool = True
) -> None:
    """Round index keys [T, D] of any float dtype to the rows `places` [T] int64 of `storage`.

    storage: see `index_row_views`. With `rotate` keys are rotated first, unless D is no power of two. Nothing
    is refused, as serving must not stop for one bad number: NaN stays NaN, whose score counts as -inf, and
    infinity saturates. A row's bytes depend on no other row.
    Raises ValueError for storage that does not fit and, on a CPU, IndexError for a row that it does not have.
    """
    values, scales = index_row_views(storage, page_size)
    if places.is_cpu and (places < 0).any():
        raise IndexError("a row is to be stored outside the storage")
    scaled, scale = _scaled(_rotated(keys) if rotate else keys.float())
    page_and_slot = places // page_size, places % page_size
    values[page_and_slot] = scaled.to(torch.float8_e4m3fn)
    scales[page_and_slot] = scale


def load_index_rows(storage: Tensor, places: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Copy the rows `places` [K] int64: e4m3 values [K, D] and fp32 scales [K]. See `index_row_views`."""
    values, scales = index_row_views(storage, page_size)
    page_and_slot = places // page_size, places % page_size
    return values[page_and_slot], scales[page_and_slot]


def decode_index_rows(storage: Tensor, places: Tensor, page_size: int) -> Tensor:
    """The rows `places` [K] int64 of FP8 storage in fp32 [K, D]; rotated rows stay rotated."""
    return dequantize_rows(*load_index_rows(storage, places, page_size))


def quantize_index_queries(query: Tensor, weights: Tensor, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """Round queries [T, H, D] of any float dtype to what FP8 index rows are multiplied with.

    weights: [T, H], one for each head. Returns the queries in bf16, rotated as the keys are and holding e4m3
    values, which bf16 has exactly, and fp32 weights [T, H] that include the scales of the queries.
    """
    scaled, scale_TH = _scaled(_rotated(query) if rotate else query.float())
    return scaled.to(torch.float8_e4m3fn).bfloat16(), weights.float() * scale_TH


def _rotated(states: Tensor) -> Tensor:
    """States [..., D] in float32, rotated where D is a power of two."""
    return hadamard(states.float()) if states.shape[-1].bit_count() == 1 else states.float()


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] fp32 divided by their scales, within 448, and the scales [...]."""
    scale = _power_of_two_scale(largest_magnitude(rows).nan_to_num_(posinf=LARGEST))
    return (rows / scale[..., None]).clamp_(-E4M3_MAX, E4M3_MAX), scale


def _power_of_two_scale(largest: Tensor) -> Tensor:
    """The least 2^k with largest <= 448 * 2^k, without the rounding of a division; 1 for 0."""
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1), and 448 is 0.875 * 2^9
    exponent = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8).clamp(min=LEAST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent).where(largest > 0, 1.0)
