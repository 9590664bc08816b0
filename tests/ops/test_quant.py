"""FP8 weight blocks: against the plain loop, against their error bound, and at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.ops.quant import dequantize_blocks, quantize_blocks, reference

SHAPES = [(1, 1), (127, 129), (128, 128), (129, 127), (300, 260), (256, 1), (1, 257)]


def drawn_weight(shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows and columns of very different size, so that a scale of the wrong block shows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(2 * torch.randn(shape[0], 1, generator=generator))
    columns = torch.exp(2 * torch.randn(1, shape[1], generator=generator))
    return (torch.randn(shape, generator=generator) * rows * columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference_bit_by_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = drawn_weight(shape, seed=1, dtype=dtype)
    weight[: shape[0] // 2, : shape[1] // 2] = 0
    quantized, scales = quantize_blocks(weight)
    expected, expected_scales = reference.quantize_blocks(weight)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    for target in (torch.float32, torch.bfloat16):
        dequantized = dequantize_blocks(quantized, scales, target)
        assert dequantized.dtype == target
        assert torch.equal(dequantized, reference.dequantize_blocks(expected, expected_scales, target))


@settings(max_examples=25)
@given(
    rows=st.integers(1, 280), columns=st.integers(1, 280), seed=st.integers(0, 99),
    magnitude=st.sampled_from([1e-38, 1e-20, 1.0, 1e30]), uniform=st.booleans(),
)  # fmt: skip
def test_error_is_within_half_a_step(
    rows: int, columns: int, seed: int, magnitude: float, uniform: bool
) -> None:
    weight = drawn_weight((rows, columns), seed).clamp(-1e6, 1e6) * magnitude
    quantized, scales = quantize_blocks(weight, uniform_uneven=uniform)
    assert scales.dtype == torch.float32
    assert scales.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns].double()
    error = (dequantize_blocks(quantized, scales).double() - weight.double()).abs()
    # Half a step is 2^-4 of a normal e4m3 value and 2^-10 below; 1e-6 is for float32's own rounding.
    assert (error <= torch.maximum(weight.double().abs() / 16, each / 1024) * (1 + 1e-6) + 1e-44).all()


@settings(max_examples=15)
@given(
    rows=st.integers(1, 200), columns=st.integers(1, 200), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_quantising_again_changes_no_value(rows: int, columns: int, seed: int, dtype: torch.dtype) -> None:
    quantized, scales = quantize_blocks(drawn_weight((rows, columns), seed))
    again, _ = quantize_blocks(dequantize_blocks(quantized, scales, dtype))
    assert torch.equal(again.float(), quantized.float())


def test_zero_blocks_have_scale_one() -> None:
    weight = torch.zeros(256, 130)
    weight[200, 129] = -3.0
    quantized, scales = quantize_blocks(weight)
    assert scales.tolist() == [[1.0, 1.0], [1.0, pytest.approx(3 / 448)]]
    assert torch.equal(dequantize_blocks(quantized, scales), weight)


def test_uniform_scales_along_uneven_sides_only() -> None:
    weight = drawn_weight((144, 256), seed=3)
    own = quantize_blocks(weight)[1]
    uniform = quantize_blocks(weight, uniform_uneven=True)[1]
    assert torch.equal(uniform, own.amax(0, keepdim=True).expand(2, 2))
    even = drawn_weight((256, 256), seed=3)
    assert torch.equal(quantize_blocks(even, uniform_uneven=True)[1], quantize_blocks(even)[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (149, 139)], ids=["first", "last"])
@pytest.mark.parametrize("quantize", [quantize_blocks, reference.quantize_blocks], ids=["fast", "reference"])
def test_what_is_not_finite_is_refused(quantize, place: tuple[int, int], bad: float) -> None:
    weight = torch.ones(150, 140)
    weight[place] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight)


def test_scales_of_another_weight_are_refused() -> None:
    quantized, scales = quantize_blocks(torch.ones(128, 256))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize_blocks(quantized, scales.T)
