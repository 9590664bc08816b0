"""The RMS norm on a GPU: against PyTorch's, and the same bits fused or not, whatever the other tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.linear import add_rms_norm, rms_norm

gpu = pytest.importorskip("megaspan.ops.linear.gpu_norm", reason="no Triton here")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-5


def make_case(device: str, tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """States cut from wider ones that hold NaN beside them, and a weight."""
    generator = torch.Generator().manual_seed(tokens * width)
    wide = torch.full((tokens, width + 16), torch.nan)
    wide[:, 8 : 8 + width] = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    return wide.to(device, dtype)[:, 8 : 8 + width], weight.to(device, dtype)


def expected_norm(states: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(states.cpu(), weight.shape, eps=EPS) * weight.cpu()


def assert_norms(actual: Tensor, states: Tensor, weight: Tensor) -> None:
    """As near to the norm in fp64 as two roundings leave it."""
    assert actual.dtype == states.dtype
    exact = F.rms_norm(states.cpu().double(), weight.shape, eps=EPS) * weight.cpu().double()
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1.01 * 2**-7
    torch.testing.assert_close(actual.cpu().double(), exact, rtol=tolerance, atol=1e-6)


@settings(max_examples=20)
@given(
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([1, 2, 16, 36, 64, 200]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_torch(kernel_device, tokens, width, dtype):
    states, weight = make_case(kernel_device, tokens, width, dtype)
    assert_norms(gpu.rms_norm_gpu(states, weight, EPS), states, weight)


def test_the_quotient_is_rounded_before_the_weight(kernel_device):
    """Else a quarter of the numbers would differ in the last place."""
    states, weight = make_case(kernel_device, 4, 512, torch.bfloat16)
    same = gpu.rms_norm_gpu(states, weight, EPS).cpu() == expected_norm(states, weight)
    assert same.float().mean() > 0.98


@settings(max_examples=10)
@given(st.integers(0, 4), st.sampled_from([1, 36, 64]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_addition_before_it_changes_no_bit(kernel_device, tokens, width, dtype):
    states, weight = make_case(kernel_device, tokens, width, dtype)
    addend = make_case(kernel_device, tokens, width, dtype)[0].roll(1, 1) / 3
    total, normed = gpu.add_rms_norm_gpu(states, addend, weight, EPS)
    assert total.equal(states + addend)
    assert normed.equal(gpu.rms_norm_gpu(total, weight, EPS))


def test_columns_that_are_apart(kernel_device):
    states, weight = torch.randn(64, 3, device=kernel_device).T, torch.ones(64, device=kernel_device)
    assert_norms(gpu.rms_norm_gpu(states, weight, EPS), states, weight)
    total, _ = gpu.add_rms_norm_gpu(states, states, weight, EPS)
    assert total.equal(2 * states)


def test_a_row_alone_counts_as_apart_by_its_width():
    """What its distance claims to be must not decide the order of additions."""
    alone = torch.randn(8, 1).T
    assert alone.stride(0) == 1
    assert gpu.row_stride(alone) == 8
    assert gpu.row_stride(torch.randn(1, 9)[:, :8]) == 9


def test_shapes_that_do_not_fit_are_refused(kernel_device):
    states, weight = torch.randn(2, 8, device=kernel_device), torch.ones(7, device=kernel_device)
    with pytest.raises(ValueError, match="do not fit"):
        gpu.rms_norm_gpu(states, weight, EPS)
    with pytest.raises(ValueError, match="do not fit"):
        gpu.add_rms_norm_gpu(states[:, :7], states[:1, :7], weight, EPS)


def test_on_a_cpu_the_two_are_the_two():
    states, weight = torch.randn(3, 8), torch.randn(8)
    total, normed = add_rms_norm(states, states, weight, EPS)
    assert total.equal(2 * states)
    assert normed.equal(rms_norm(total, weight, EPS))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestAtRealWidths:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("width", [512, 2048, 6144])
    def test_equals_torch_and_a_token_does_not_depend_on_the_others(self, width, dtype):
        states, weight = make_case("cuda", 300, width, dtype)
        together = rms_norm(states, weight, EPS)
        assert_norms(together, states, weight)
        for few in (slice(0, 1), slice(7, 8), slice(5, 22), slice(299, 300)):
            assert rms_norm(states[few], weight, EPS).equal(together[few])
            assert rms_norm(states[few].clone(), weight, EPS).equal(together[few])
            total, normed = add_rms_norm(states[few], torch.zeros_like(states[few]), weight, EPS)
            assert total.equal(states[few])
            assert normed.equal(together[few])

    def test_gradients_take_pytorchs_way(self):
        states, weight = make_case("cuda", 3, 64, torch.float32)
        states = states.clone().requires_grad_()
        total, normed = add_rms_norm(states, states.detach(), weight, EPS)
        (normed.sum() + total.sum()).backward()
        assert states.grad is not None

    def test_past_2_to_the_31_numbers(self):
        states = torch.full(((1 << 31) // 6144 + 2, 6144), torch.nan, dtype=torch.bfloat16, device="cuda")
        states[-1] = torch.randn(6144)
        weight = torch.ones(6144, dtype=torch.bfloat16, device="cuda")
        assert_norms(rms_norm(states, weight, EPS)[-1:], states[-1:], weight)
