"""Routing: the compiled version against PyTorch's, ties, gradients, and that no token depends on another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.router import native, route, route_reference

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(native._function() is None, reason="no compiler here"),
]
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
some = settings(max_examples=30)


def make_case(
    tokens: int, width: int, experts: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width + 3, generator=generator).to(dtype)[:, :width]
    weight = torch.randn(experts, width, generator=generator) * width**-0.5
    return hidden, weight, torch.rand(experts, generator=generator)


@some
@given(
    st.sampled_from([0, 1, 2, 3, 4, 9, 130]),
    st.sampled_from([1, 16, 33, 64]),
    st.integers(1, 20),
    st.data(),
    dtypes,
    st.booleans(),
)
def test_equals_torch(tokens, width, experts, data, dtype, normalise):
    topk, case = data.draw(st.integers(1, experts)), make_case(tokens, width, experts, dtype)
    ids, weights = native.route_native(*case, topk, normalise, 2.5)
    expected_ids, expected = route_reference(*case, topk, normalise, 2.5)
    assert ids.equal(expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "one by one"])
@some
@given(st.integers(1, 70), st.data(), dtypes)
def test_a_token_does_not_depend_on_the_others(compiled, tokens, data, dtype):
    """Bit for bit."""
    case = make_case(tokens, 40, 9, dtype)
    first = data.draw(st.integers(0, tokens - 1))
    few = slice(first, data.draw(st.integers(first + 1, tokens)))
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "can_take", lambda *_: False)
        together = route(*case, 3, True, 2.5, invariant=True)
        alone = route(case[0][few], *case[1:], 3, True, 2.5, invariant=True)
    assert all(one.equal(all_of_them[few]) for one, all_of_them in zip(alone, together, strict=True))


def test_threads_do_not_matter(monkeypatch):
    monkeypatch.setattr(native, "WORTH_THREADS", 0)
    case, before = make_case(133, 40, 9, torch.float32), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(native.route_native(*case, 3, True, 2.5))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(other, results[0], strict=True))


def test_ties_go_to_the_lowest_expert():
    """P14: equal scores are no reason to choose by chance."""
    hidden, weight = torch.ones(5, 8), torch.ones(6, 8)
    bias = torch.tensor([0.0, 1, 0, 1, 1, 0])
    ids, _ = route(hidden, weight, bias, 4, True, 1.0)
    assert ids.tolist() == [[1, 3, 4, 0]] * 5


def test_not_a_number_still_names_experts_that_exist():
    hidden = torch.ones(1, 8)
    hidden[0, 0] = torch.nan
    ids, weights = route(hidden, torch.ones(6, 8), torch.zeros(6), 4, True, 1.0)
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist())
    assert all(0 <= expert < 6 for expert in ids[0].tolist())
    assert weights.isnan().all()


def test_large_logits_saturate():
    ids, weights = route(
        torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [-1.0]]), torch.zeros(2), 1, False, 1
    )
    assert ids.tolist() == [[0], [1]]
    assert weights.tolist() == [[1.0], [1.0]]


def test_gradients_flow_to_states_and_weight():
    hidden, weight, bias = make_case(5, 8, 6, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    route(hidden, weight, bias, 2, True, 1.0)[1].square().sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().sum() * weight.grad.abs().sum() > 0


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, bias = make_case(2, 8, 6, torch.float32)
    for arguments in (
        (hidden[:, :7], weight, bias, 2),
        (hidden, weight, bias[:5], 2),
        (hidden, weight, bias, 7),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            native.route_native(*arguments, True, 1.0)
