"""silu(gate) * up on a GPU, against PyTorch's two operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

gpu = pytest.importorskip("megaspan.ops.moe.gpu_activation", reason="no Triton here")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=15)
@given(st.integers(0, 3), st.sampled_from([1, 7, 64, 2048, 2050]), dtypes)
def test_equals_torch_on_the_halves_of_a_product(kernel_device, tokens, inner, dtype):
    product = 4 * torch.randn(tokens, 2 * inner, generator=torch.Generator().manual_seed(inner)).to(dtype)
    actual = gpu.silu_and_multiply(*product.to(kernel_device).chunk(2, 1))
    gate, up = product.chunk(2, 1)
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual.cpu(), silu(gate) * up, rtol=tolerance, atol=1e-6)


def test_silu_is_rounded_before_the_product(kernel_device):
    """Else a quarter of the numbers would differ in the last place."""
    gate, up = torch.randn(2, 1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    same = gpu.silu_and_multiply(gate.to(kernel_device), up.to(kernel_device)).cpu() == silu(gate) * up
    assert same.float().mean() > 0.98


def test_large_numbers_and_nan(kernel_device):
    gate = torch.tensor([[-1e4, 1e4, torch.nan, 1.0, 0.0]], device=kernel_device)
    up = torch.tensor([[2.0, 2.0, 2.0, torch.nan, 5.0]], device=kernel_device)
    actual = gpu.silu_and_multiply(gate, up)[0].tolist()
    assert actual[:2] == [0.0, 2e4]
    assert actual[4] == 0.0
    assert all(number != number for number in actual[2:4])


def test_shapes_that_do_not_fit_are_refused(kernel_device):
    gate = torch.zeros(2, 4, device=kernel_device)
    with pytest.raises(ValueError, match="do not fit"):
        gpu.silu_and_multiply(gate, gate[:, :3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_past_2_to_the_31_numbers():
    product = torch.full(((1 << 31) // 24576 + 2, 24576), torch.nan, dtype=torch.bfloat16, device="cuda")
    product[-1] = torch.randn(24576)
    gate, up = product.chunk(2, 1)
    last = gpu.silu_and_multiply(gate, up)[-1]
    torch.testing.assert_close(last, silu(gate[-1]) * up[-1], rtol=2**-7, atol=1e-6)
