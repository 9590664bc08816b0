"""Routing on a GPU: exact logits of float32 weights, ties, and that no token depends on another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.router import route, route_reference

gpu = pytest.importorskip("megaspan.ops.router.gpu", reason="no Triton here")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_case(
    tokens: int, width: int, experts: int, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 states cut from wider ones that hold NaN beside them, a weight and a bias in float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.full((tokens, width + 3), torch.nan)
    hidden[:, 1 : 1 + width] = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(experts, width, generator=generator) * width**-0.5
    bias = torch.rand(experts, generator=generator)
    return hidden.to(device, torch.bfloat16)[:, 1 : 1 + width], weight.to(device), bias.to(device)


def assert_routes_like_float64(case: tuple[Tensor, ...], topk: int, normalise: bool) -> None:
    """The chosen have the scores of the best in order, up to rounding, and weights of their own scores."""
    hidden, weight, bias = (operand.double().cpu() for operand in case)
    ids, weights = (result.cpu() for result in gpu.route_gpu(*case, topk, normalise, 2.5))
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    scores = (hidden @ weight.T).sigmoid()
    choice = scores + bias
    assert all(len(set(chosen)) == topk for chosen in ids.tolist())
    torch.testing.assert_close(choice.gather(1, ids), choice.topk(topk).values, rtol=0, atol=4e-6)
    own = scores.gather(1, ids)
    expected = own / own.sum(1, keepdim=True) if normalise else own
    torch.testing.assert_close(weights.double(), expected * 2.5, rtol=1e-5, atol=0)


@settings(max_examples=8)
@given(
    st.sampled_from([0, 1, 3, 17, 70]),
    st.sampled_from([1, 33, 64, 192, 200, 400]),
    st.integers(1, 20),
    st.data(),
    st.booleans(),
)
def test_equals_float64(kernel_device, tokens, width, experts, data, normalise):
    case = make_case(tokens, width, experts, kernel_device)
    assert_routes_like_float64(case, data.draw(st.integers(1, min(experts, 4))), normalise)


def test_many_tokens_have_the_bits_of_few(kernel_device, monkeypatch):
    """The stretches of the width are added by one kernel or the other, in one order."""
    case = make_case(20, 500, 9, kernel_device)
    few = gpu.route_gpu(*case, 3, True, 2.5)
    monkeypatch.setattr(gpu, "FEW_TOKENS", 0)
    many = gpu.route_gpu(*case, 3, True, 2.5)
    assert all(one.equal(other) for one, other in zip(few, many, strict=True))


def test_ties_go_to_the_lowest_expert(kernel_device):
    hidden = torch.ones(5, 8, dtype=torch.bfloat16, device=kernel_device)
    bias = torch.tensor([0.0, 1, -0.0, 1, 1, -3], device=kernel_device)
    ids, _ = gpu.route_gpu(hidden, torch.zeros(6, 8, device=kernel_device), bias, 5, True, 1.0)
    assert ids.tolist() == [[1, 3, 4, 0, 2]] * 5


def test_not_a_number_still_names_experts_that_exist(kernel_device):
    hidden = torch.ones(2, 8, dtype=torch.bfloat16, device=kernel_device)
    hidden[0, 0] = torch.nan
    weight, bias = torch.ones(6, 8, device=kernel_device), torch.zeros(6, device=kernel_device)
    ids, weights = gpu.route_gpu(hidden, weight, bias, 4, True, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_expert_that_is_not_a_number_comes_first(kernel_device, sign):
    """As PyTorch has it, whatever the sign of the NaN."""
    hidden = torch.ones(1, 8, dtype=torch.bfloat16, device=kernel_device)
    weight, bias = torch.ones(6, 8, device=kernel_device), torch.zeros(6, device=kernel_device)
    weight[3] = sign * torch.tensor(torch.nan)
    ids, weights = gpu.route_gpu(hidden, weight, bias, 2, False, 1.0)
    assert ids.tolist() == [[3, 0]]
    assert weights.isnan().tolist() == [[True, False]]


def test_large_logits_saturate(kernel_device):
    hidden = torch.tensor([[1e4], [-1e4]], dtype=torch.bfloat16, device=kernel_device)
    weight = torch.tensor([[1.0], [-1.0]], device=kernel_device)
    ids, weights = gpu.route_gpu(hidden, weight, torch.zeros(2, device=kernel_device), 2, False, 1)
    assert ids.tolist() == [[0, 1], [1, 0]]
    assert weights.tolist() == [[1.0, 0.0]] * 2


def test_shapes_that_do_not_fit_are_refused(kernel_device):
    hidden, weight, bias = make_case(2, 8, 6, kernel_device)
    for arguments in (
        (hidden[:, :7], weight, bias, 2),
        (hidden, weight, bias[:5], 2),
        (hidden, weight, bias, 7),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            gpu.route_gpu(*arguments, True, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestAtRealWidths:
    @pytest.mark.parametrize("tokens", [1, 64, 65, 513])
    def test_equals_float64(self, tokens):
        assert_routes_like_float64(make_case(tokens, 6144, 256, "cuda"), 8, True)

    def test_a_token_does_not_depend_on_the_others(self):
        hidden, *others = make_case(2000, 6144, 256, "cuda")
        together = route(hidden, *others, 8, True, 2.5)
        for few in (
            slice(0, 1),
            slice(7, 9),
            slice(3, 19),
            slice(100, 165),
            slice(1000, 1512),
            slice(1, 1000),
        ):
            for states in (hidden[few], hidden[few].clone()):
                alone = route(states, *others, 8, True, 2.5, invariant=True)
                assert all(a.equal(b[few]) for a, b in zip(alone, together, strict=True))

    def test_gradients_take_pytorchs_way(self):
        hidden, weight, bias = make_case(5, 64, 6, "cuda")
        weight.requires_grad_()
        ids, weights = route(hidden, weight, bias, 2, True, 1.0)
        weights.square().sum().backward()
        assert weight.grad is not None
        assert ids.equal(route_reference(hidden, weight, bias, 2, True, 1.0)[0])
