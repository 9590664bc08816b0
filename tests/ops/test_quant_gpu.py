"""FP8 on a GPU: the bits of the PyTorch versions, for index queries and for blocks of weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops import quant
from megaspan.ops.quant import index_rows, vectorised

gpu_rows = pytest.importorskip("megaspan.ops.quant.gpu_rows", reason="no Triton here")
gpu_blocks = pytest.importorskip("megaspan.ops.quant.gpu_blocks", reason="no Triton here")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
magnitudes = st.sampled_from([1e-38, 1e-3, 1.0, 300.0, 1e30])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal bits, but for the kind of NaN."""
    return actual.cpu().float().nan_to_num(nan=1e9).equal(expected.float().nan_to_num(nan=1e9))


def assert_quantizes_queries_like_pytorch(query: Tensor, weights: Tensor, rotate: bool, device: str) -> None:
    actual = gpu_rows.quantize_index_queries_gpu(query.to(device), weights.to(device), rotate)
    expected = index_rows.quantize_index_queries(query, weights, rotate)
    assert [result.dtype for result in actual] == [torch.bfloat16, torch.float32]
    assert same(actual[0], expected[0])
    assert same(actual[1], expected[1])


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 3),
    heads=st.sampled_from([1, 3, 5]),
    width=st.sampled_from([1, 2, 6, 64, 128]),
    rotate=st.booleans(),
    magnitude=magnitudes,
    dtype=dtypes,
)
def test_queries_have_the_bits_of_pytorch(kernel_device, tokens, heads, width, rotate, magnitude, dtype):
    query = (normal(tokens, heads, width, seed=width) * magnitude).to(dtype)
    assert_quantizes_queries_like_pytorch(query, normal(tokens, heads), rotate, kernel_device)


@pytest.mark.parametrize("rotate", [True, False])
def test_odd_queries(kernel_device, rotate):
    """Zeros, NaN, infinity, numbers that are not normal, and scales at the edge of a power of two."""
    query, just_above = normal(8, 1, 8), torch.tensor(448.0).nextafter(torch.tensor(449.0))
    query[0], query[1, 0, 3], query[2, 0, 3], query[3] = 0, torch.nan, -torch.inf, 1e-42
    query[4], query[5], query[6], query[7] = 448, just_above, 3e38, torch.nan
    query[2, 0, 5] = 0
    assert_quantizes_queries_like_pytorch(query, normal(8, 1), rotate, kernel_device)


def test_queries_that_are_views(kernel_device):
    wide, weights = normal(3, 4, 20).to(kernel_device), normal(4, 3).to(kernel_device).T
    actual = gpu_rows.quantize_index_queries_gpu(wide[..., 2:18], weights)
    expected = index_rows.quantize_index_queries(wide[..., 2:18].cpu(), weights.cpu())
    assert same(actual[0], expected[0])
    assert same(actual[1], expected[1])
    with pytest.raises(ValueError, match="do not fit"):
        gpu_rows.quantize_index_queries_gpu(wide, weights.T)


def assert_quantizes_blocks_like_pytorch(weight: Tensor) -> None:
    values, scale_inv = gpu_blocks.quantize_blocks_gpu(weight)
    expected_scales = vectorised.block_scales(weight.cpu())
    expected = vectorised.quantize_with(weight.cpu(), expected_scales)
    assert scale_inv.cpu().equal(expected_scales)
    assert values.view(torch.uint8).cpu().equal(expected.view(torch.uint8))
    for dtype in (torch.float32, torch.bfloat16):
        decoded = gpu_blocks.dequantize_blocks_gpu(values, scale_inv, dtype)
        assert decoded.cpu().equal(vectorised.dequantize_blocks(expected, expected_scales, dtype))


@settings(max_examples=12)
@given(
    rows=st.sampled_from([0, 1, 5, 127, 130]),
    columns=st.sampled_from([1, 100, 128, 129, 260]),
    magnitude=magnitudes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_blocks_have_the_bits_of_pytorch(kernel_device, rows, columns, magnitude, dtype):
    """Cut from a wider weight that holds NaN beside them."""
    magnitude = min(magnitude, 300.0) if dtype == torch.float16 else magnitude
    wide = torch.full((rows, columns + 5), torch.nan)
    wide[:, 2 : 2 + columns] = normal(rows, columns, seed=columns) * magnitude
    assert_quantizes_blocks_like_pytorch(wide.to(kernel_device, dtype)[:, 2 : 2 + columns])


def test_a_block_of_zeros_and_a_transposed_weight(kernel_device):
    weight = normal(140, 300)
    weight[:128, 128:256] = 0
    assert_quantizes_blocks_like_pytorch(weight.to(kernel_device).T)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused(kernel_device, bad):
    weight = normal(130, 4).to(kernel_device)
    weight[129, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        gpu_blocks.quantize_blocks_gpu(weight)


def test_scales_that_do_not_fit_are_refused(kernel_device):
    values = torch.zeros(4, 4, dtype=torch.uint8, device=kernel_device).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not fit"):
        gpu_blocks.dequantize_blocks_gpu(values, torch.ones(1, 2, device=kernel_device), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestAtRealWidths:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_queries(self, dtype):
        query, weights = normal(300, 32, 128).to(dtype), normal(300, 32)
        assert_quantizes_queries_like_pytorch(query, weights, True, "cuda")
        together = quant.quantize_index_queries(query.cuda(), weights.cuda())
        alone = quant.quantize_index_queries(query[7:8].cuda(), weights[7:8].cuda())
        assert all(one.equal(of_all[7:8]) for one, of_all in zip(alone, together, strict=True))

    def test_blocks(self):
        assert_quantizes_blocks_like_pytorch(normal(6144, 2048).bfloat16().cuda())

    def test_blocks_whose_uneven_edges_share_a_scale(self):
        weight = normal(144, 300)
        for actual, expected in zip(
            quant.quantize_blocks(weight.cuda(), True), quant.quantize_blocks(weight, True), strict=True
        ):
            assert actual.cpu().float().equal(expected.float())

    def test_past_2_to_the_31_numbers(self):
        weight = torch.zeros((1 << 31) // 8192 + 128, 8192, dtype=torch.bfloat16, device="cuda")
        weight[-128:] = normal(128, 8192)
        values, scale_inv = quant.quantize_blocks(weight)
        expected = quant.quantize_blocks(weight[-128:].cpu())
        assert values[-128:].view(torch.uint8).cpu().equal(expected[0].view(torch.uint8))
        decoded = quant.dequantize_blocks(values, scale_inv, torch.bfloat16)
        assert decoded[-128:].cpu().equal(quant.dequantize_blocks(*expected, torch.bfloat16))
