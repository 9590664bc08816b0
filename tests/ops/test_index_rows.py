"""FP8 index rows: the rotation, the scales and what they lose. P06 is a fault that other engines had."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.quant import (
    decode_index_rows,
    dequantize_rows,
    hadamard,
    index_rows,
    load_index_rows,
    native,
    quantize_index_queries,
    quantize_rows,
    store_index_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
WIDTH = 128  # that of the released model
needs_native = pytest.mark.skipif(not native.supports(torch.empty(1, 1)), reason="no C compiler here")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(keys: Tensor, page_size: int = 4, rotate: bool = True, store=store_index_rows) -> Tensor:
    """The keys in order, in as many pages as they need; what of those is not filled is NaN."""
    count = -(-len(keys) // page_size) * page_size
    storage = torch.full((count, keys.shape[1] + 4), 255, dtype=torch.uint8)
    store(keys, storage, torch.arange(len(keys)), page_size, rotate)
    return storage


def decoded(storage: Tensor, count: int, page_size: int = 4) -> Tensor:
    """The first rows of a storage."""
    return decode_index_rows(storage, torch.arange(count), page_size)


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


@settings(max_examples=40)
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


def score_error(keys: Tensor, query: Tensor, weights: Tensor, rotate: bool) -> float:
    """The relative error of the indexer's scores when keys and queries are in FP8."""

    def scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        return (weights.double()[..., None] * (query.double() @ keys.double().T).relu()).sum(1)

    exact = scores(query, weights, keys)
    rounded = quantize_index_queries(query, weights, rotate)
    actual = scores(*rounded, decoded(stored(keys, rotate=rotate), len(keys)))
    return float((actual - exact).norm() / exact.norm())


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_packed_rows_keep_what_outliers_would_lose(seed):
    """P06: rotated error below half the unrotated with outliers; the rotation is neutral without them."""
    keys, query, weights = (
        normal(90, WIDTH, seed=seed),
        normal(20, 8, WIDTH, seed=seed + 9),
        normal(20, 8).abs(),
    )
    rotated, plain = (score_error(keys, query, weights, rotate) for rotate in (True, False))
    assert 0.75 < rotated / plain < 1.3
    assert max(rotated, plain) < 0.05
    large = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(seed))[:3]
    keys[:, large] *= 100
    query[..., large] *= 100
    assert score_error(keys, query, weights, True) < score_error(keys, query, weights, False) / 2


@pytest.mark.parametrize("width", [3, 96, 127])
def test_a_width_that_cannot_be_rotated_is_packed_as_it_is(width):
    """So are the queries: both sides follow the same rule."""
    keys, query, weights = normal(9, width), normal(4, 3, width, seed=1), normal(4, 3, seed=2)
    assert torch.equal(stored(keys), stored(keys, rotate=False))
    for kept, plain in zip(
        quantize_index_queries(query, weights), quantize_index_queries(query, weights, False), strict=True
    ):
        assert torch.equal(kept, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_e4m3_values_whose_scales_are_in_the_weights(dtype):
    query, weights = (normal(6, 5, WIDTH) * 7).to(dtype), normal(6, 5, seed=1)
    values, folded = quantize_index_queries(query, weights)
    assert (values.dtype, folded.dtype) == (torch.bfloat16, torch.float32)
    expected, scale = quantize_rows(query.flatten(0, 1))
    assert torch.equal(values.float(), expected.float().view(6, 5, WIDTH))
    assert torch.equal(folded, weights * scale.view(6, 5))


def test_a_packed_row_depends_on_no_other():
    """In batch-invariant mode the cache of a token alone is that of the token in a batch, bit by bit."""
    keys, weights = normal(67, WIDTH), normal(67, 4)
    query = normal(67, 4, WIDTH, seed=1)
    packed = stored(keys)
    together = quantize_index_queries(query, weights)
    for token in (0, 30, 66):
        one = slice(token, token + 1)
        values, scale = load_index_rows(stored(keys[one]), torch.tensor([0]), 4)
        in_batch = load_index_rows(packed, torch.tensor([token]), 4)
        assert torch.equal(values.view(torch.uint8), in_batch[0].view(torch.uint8))
        assert torch.equal(scale, in_batch[1])
        for alone, kept in zip(quantize_index_queries(query[one], weights[one]), together, strict=True):
            assert torch.equal(alone, kept[one])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_packed_without_a_word(bad):
    """Serving must not stop for it; the other rows stay as they are."""
    keys = normal(5, 16)
    keys[4, 15] = bad
    for rotate in (True, False):
        rows = decoded(stored(keys, rotate=rotate), 5)
        assert torch.equal(rows[:4], decoded(stored(keys[:4], rotate=rotate), 4))
        if math.isnan(bad):  # the score counts as -inf
            assert rows[4].isnan().any()
        else:
            assert rows[4].isfinite().all()
            assert rows[4, 15].abs() > 1e38


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same numbers; a NaN may have either sign."""
    return left.dtype == right.dtype and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


@needs_native
@settings(max_examples=40)
@given(
    count=st.sampled_from([0, 1, 3, 400]),
    width=st.sampled_from([1, 7, 32, 96, 128, 256]),
    magnitude=st.sampled_from([1e-44, 1e-38, 1e-5, 1.0, 1e30, 1e37]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rotate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_native_equals_the_plain_versions_bit_by_bit(count, width, magnitude, dtype, rotate, seed):
    keys, weights = (normal(count, width, seed=seed) * magnitude).to(dtype), normal(count, 1, seed=seed)
    keys[1:2], keys[2:3, -1], keys[3:4], keys[4:5, 0] = 0, math.nan, -math.inf, math.inf
    versions = (stored(keys, 4, rotate, version.store_index_rows) for version in (native, index_rows))
    places = torch.arange(count)
    for compiled, expected in zip(*(load_index_rows(rows, places, 4) for rows in versions), strict=True):
        assert same_bits(compiled.float(), expected.float())
    query = keys[:, None]
    for compiled, expected in zip(
        native.quantize_index_queries(query, weights, rotate),
        index_rows.quantize_index_queries(query, weights, rotate),
        strict=True,
    ):
        assert same_bits(compiled, expected)


@needs_native
def test_native_rounds_every_bf16_as_the_plain_version():
    """All within 448, so each value of e4m3 and each tie between two; the 448 beside them sets the scale."""
    every = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    rows = torch.stack((every[every.abs() <= 448], torch.full_like(every[every.abs() <= 448], 448.0)), 1)
    compiled, plain = (stored(rows, 64, False, version.store_index_rows) for version in (native, index_rows))
    assert torch.equal(compiled, plain)
    weights = torch.ones(len(rows), 1)
    rounded = native.quantize_index_queries(rows[:, None], weights, False)[0]
    assert torch.equal(rounded, index_rows.quantize_index_queries(rows[:, None], weights, False)[0])
