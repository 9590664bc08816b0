"""FP8 index rows: the rotation, the scales and what they lose. P06 is a fault that other engines had."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.quant import dequantize_rows, hadamard, quantize_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
WIDTH = 128  # that of the released model


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product_error(query: Tensor, keys: Tensor, rotate: bool) -> float:
    """The relative error (of the Frobenius norm) of all dot products when both sides are FP8 rows."""
    exact = query.double() @ keys.double().T
    rounded = [dequantize_rows(*quantize_rows(rows, rotate)).double() for rows in (query, keys)]
    return float((rounded[0] @ rounded[1].T - exact).norm() / exact.norm())


@pytest.mark.parametrize("width", [1, 2, 16, 128, 256])
def test_the_matrix_is_orthonormal_and_its_own_inverse(width):
    matrix = hadamard(torch.eye(width))
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix.abs(), torch.full((width, width), width**-0.5))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width), rtol=0, atol=1e-6)
    states = normal(3, 2, width)
    torch.testing.assert_close(hadamard(states), states @ matrix, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(states)), states, rtol=1e-5, atol=1e-5)


def test_the_matrix_of_four_is_sylvesters():
    signs = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert torch.equal(hadamard(torch.eye(4)), torch.tensor(signs) / 2)


def test_rotating_both_sides_leaves_dot_products_as_they_are():
    query, keys = normal(32, WIDTH), normal(50, WIDTH, seed=1)
    torch.testing.assert_close(hadamard(query) @ hadamard(keys).T, query @ keys.T, rtol=1e-5, atol=1e-4)


def test_low_precision_is_rotated_in_float32():
    states = normal(9, WIDTH).bfloat16()
    assert torch.equal(hadamard(states), hadamard(states.float()).bfloat16())
    for kept, exact in zip(quantize_rows(states), quantize_rows(states.float()), strict=True):
        assert torch.equal(kept.float(), exact.float())


@pytest.mark.parametrize("width", [0, 3, 96, 127])
def test_other_widths_are_refused(width):
    with pytest.raises(ValueError, match=f"power of two, not {width}"):
        hadamard(torch.zeros(2, width))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("outliers", [1, 4])
def test_rotation_more_than_halves_the_error_of_rows_with_outliers(outliers, seed):
    """P06: without it the rounding of a few large dimensions is the error of the whole product."""
    query, keys = normal(100, WIDTH, seed=seed), normal(100, WIDTH, seed=seed + 50)
    large = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(seed))[:outliers]
    query[:, large] *= 100
    keys[:, large] *= 100
    assert product_error(query, keys, rotate=True) < product_error(query, keys, rotate=False) / 2


@pytest.mark.parametrize("seed", range(4))
def test_rotation_is_neutral_for_gaussian_rows(seed):
    """P06."""
    query, keys = normal(100, WIDTH, seed=seed), normal(100, WIDTH, seed=seed + 50)
    rotated, plain = (product_error(query, keys, rotate) for rotate in (True, False))
    assert 0.8 < rotated / plain < 1.2
    assert max(rotated, plain) < 0.05


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 40),
    width=st.sampled_from([1, 2, 8, 64, 128, 512]),
    rotate=st.booleans(),
    magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 300.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_scales_are_the_least_powers_of_two_and_values_are_within_half_a_step(
    count, width, rotate, magnitude, dtype, seed
):
    states = (normal(count, width, seed=seed) * magnitude).to(dtype)
    values, scale = quantize_rows(states, rotate)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, (count, width))
    assert (scale.dtype, scale.shape) == (torch.float32, (count,))
    assert (torch.frexp(scale).mantissa == 0.5).all()
    rows = (hadamard(states.float()) if rotate else states.float()).double()
    filled = rows.abs().amax(-1) / scale.double()
    assert ((filled > 224) & (filled <= 448)).all()
    error = (dequantize_rows(values, scale).double() - rows).abs()
    # Half a step is 2^-4 of a normal e4m3 value and 2^-10 of the scale below.
    assert (error <= torch.maximum(rows.abs() / 16, scale[:, None].double() / 1024)).all()


def test_scales_at_the_edge_of_a_power_of_two():
    largest = torch.tensor([448.0, 448.0001, 224.0, 0.0, -1.75, 1e-45, 3e38])
    values, scale = quantize_rows(largest[:, None], rotate=False)
    assert scale[:5].tolist() == [1.0, 2.0, 0.5, 1.0, 2**-8]
    assert scale[5:].tolist() == [2.0**-126, 2.0**120]
    assert values[:, 0].float().tolist() == [448.0, 224.0, 448.0, 0.0, -448.0, 0.0, 224.0]


def test_a_row_takes_132_bytes_at_the_real_width():
    values, scale = quantize_rows(normal(7, WIDTH))
    assert values.nbytes + scale.nbytes == 7 * 132


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad, rotate):
    states = torch.ones(5, 16)
    states[4, 15] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_rows(states, rotate)


def test_a_width_that_cannot_be_rotated_is_kept_as_it_is():
    states = normal(3, 96)
    with pytest.raises(ValueError, match="power of two"):
        quantize_rows(states)
    torch.testing.assert_close(
        dequantize_rows(*quantize_rows(states, rotate=False)), states, rtol=1 / 16, atol=0.01
    )


def test_scales_of_other_rows_are_refused():
    values, scale = quantize_rows(normal(7, 16))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize_rows(values, scale[:6])
