"""The compiled products against PyTorch's own, where each is taken, and that no token depends on another."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.linear import head_combine, head_linear, linear, native, rms_norm

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(native._library() is None, reason="no compiler here"),
]
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
few_tokens = st.integers(1, 9)  # every tile and its edges
widths = st.sampled_from([1, 2, 7, 8, 31, 33, 64, 129])
some = settings(max_examples=40)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, exact: Tensor) -> None:
    """Equal to the sum in fp64, up to the rounding of fp32 sums and of the result's dtype."""
    assert actual.shape == exact.shape
    tolerance = 1e-2 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)


@some
@given(few_tokens, widths, st.sampled_from([1, 5, 32, 33, 70]), dtypes, st.integers(0, 9))
def test_linear_equals_torch(tokens, inputs, outputs, dtype, seed):
    """Tokens cut from a wider projection, weights cut from a wider matrix: strides, not copies."""
    states = draw(tokens, inputs + 5, dtype=dtype, seed=seed)[:, 3 : 3 + inputs]
    weight = draw(outputs, inputs + 3, dtype=dtype, seed=seed + 1)[:, 2 : 2 + inputs]
    assert_close(native.linear_native(states, weight), states.double() @ weight.double().T)


@some
@given(few_tokens, st.integers(1, 5), widths, st.sampled_from([1, 6, 33]), dtypes, st.integers(0, 9))
def test_head_products_equal_torch(tokens, heads, inputs, outputs, dtype, seed):
    """Heads split from one projection, and the two halves of kv_b_proj, as latent attention passes them."""
    states = draw(tokens, heads, inputs + 4, dtype=dtype, seed=seed)[..., :inputs]
    kv_b = draw(heads, outputs + 3, inputs, dtype=dtype, seed=seed + 1)
    expected = torch.einsum("thi,hoi->tho", states.double(), kv_b[:, 3:].double())
    assert_close(native.head_linear_native(states, kv_b[:, 3:]), expected)
    kv_b = draw(heads, inputs + 3, outputs, dtype=dtype, seed=seed + 2)
    expected = torch.einsum("thi,hio->tho", states.double(), kv_b[:, :inputs].double())
    assert_close(native.head_combine_native(states, kv_b[:, :inputs]), expected)


@some
@given(few_tokens, widths, dtypes, st.sampled_from([1e-5, 1e-6]), st.integers(0, 9))
def test_rms_norm_equals_torch(tokens, width, dtype, eps, seed):
    states = draw(tokens, width + 4, dtype=dtype, seed=seed)[:, 1 : 1 + width]
    weight = draw(width, dtype=dtype, seed=seed + 1)
    expected = F.rms_norm(states, (width,), eps=eps) * weight
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # one rounding of bf16 is up to 2^-8
    actual = native.rms_norm_native(states, weight, eps)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_weighs_the_rounded_quotient():
    """As transformers does: rounding once, after the weight, gives other bits for some of 4,096 numbers."""
    states, weight = draw(4, 1024, dtype=torch.bfloat16), draw(1024, dtype=torch.bfloat16, seed=1)
    quotient = F.rms_norm(states.float(), (1024,), eps=1e-5)
    twice, once = quotient.bfloat16() * weight, (quotient * weight.float()).bfloat16()
    actual = native.rms_norm_native(states, weight, 1e-5)
    assert (actual != twice).float().mean() < 0.01 < (actual != once).float().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_finite_numbers_come_through(dtype):
    weight = torch.eye(40, dtype=dtype)
    states = torch.ones(2, 40, dtype=dtype)
    states[0, 0] = torch.nan
    assert native.linear_native(states, weight)[0].isnan().all()
    assert torch.equal(native.linear_native(states, weight)[1], states[1])
    assert native.rms_norm_native(states, weight[0], 1e-5)[0].isnan().all()
    largest = torch.finfo(dtype).max
    doubled = native.linear_native(
        torch.full((1, 1), largest, dtype=dtype), torch.full((1, 1), 2, dtype=dtype)
    )
    assert doubled.isinf().all()


def every_product(states: Tensor, weight: Tensor) -> list[Tensor]:
    """states [T, H, I], weight [H, O, I], through all operations in batch-invariant mode."""
    return [
        linear(states[:, 0], weight[0], invariant=True),
        head_linear(states, weight, invariant=True),
        head_combine(states, weight.mT.contiguous(), invariant=True),
        rms_norm(states[:, 0], weight[0, 0], 1e-5, invariant=True),
    ]


@some
@given(
    st.sampled_from([1, 2, 3, 5, 17, 64, 70, 131]),
    st.data(),
    st.sampled_from([1, 3, 16, 31, 33, 64, 163]),
    st.sampled_from([1, 4, 15, 17, 64, 67]),
    dtypes,
)
def test_a_token_does_not_depend_on_its_company(tokens, data, inputs, outputs, dtype):
    """Bit for bit: any stretch of the tokens, so any number of them at any place."""
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first + 1, tokens))
    states, weight = draw(tokens, 2, inputs, dtype=dtype), draw(2, outputs, inputs, dtype=dtype, seed=1)
    fewer = every_product(states[first:last], weight)
    for one, all_of_them in zip(fewer, every_product(states, weight), strict=True):
        assert one.equal(all_of_them[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_matter(dtype):
    states, weight = draw(131, 3, 163, dtype=dtype), draw(3, 451, 163, dtype=dtype, seed=1)
    assert weight.numel() > native.WORTH_THREADS
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(every_product(states, weight))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_compiled_versions_tokens_are_computed_one_by_one(monkeypatch, dtype):
    monkeypatch.setattr(native, "can_take", lambda *_: False)
    states, weight = draw(21, 3, 163, dtype=dtype), draw(3, 70, 163, dtype=dtype, seed=1)
    together = every_product(states, weight)
    assert_close(together[0], states[:, 0].double() @ weight[0].double().T)
    for first, last in ((0, 1), (3, 9), (20, 21)):
        for one, all_of_them in zip(every_product(states[first:last], weight), together, strict=True):
            assert one.equal(all_of_them[first:last])
    assert linear(states[:0, 0], weight[0], invariant=True).shape == (0, 70)


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Names of the compiled versions that a dispatcher called."""
    names: list[str] = []
    for name in ("linear_native", "head_linear_native", "head_combine_native", "rms_norm_native"):
        original = getattr(native, name)

        def spy(*arguments, name=name, original=original):
            names.append(name)
            return original(*arguments)

        monkeypatch.setattr(native, name, spy)
    return names


@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_few_tokens_take_the_compiled_version_and_many_do_not(taken, tokens):
    states, weight = draw(tokens, 2, 300) / 10, draw(2, 400, 300, seed=1)
    assert_close(linear(states[:, 0], weight[0]), states[:, 0].double() @ weight[0].double().T)
    expected = torch.einsum("thi,hoi->tho", states.double(), weight.double())
    assert_close(head_linear(states, weight), expected)
    assert_close(head_combine(states, weight.mT.contiguous()), expected)
    rms_norm(states[:, 0], weight[0, 0], 1e-5)
    assert len(taken) == (4 if tokens <= native.FEW_TOKENS else 0)
    taken.clear()
    every_product(states, weight)
    assert len(taken) == 4


def test_no_tokens():
    states, weight = draw(0, 2, 200), draw(2, 400, 200)
    assert linear(states[:, 0], weight[0]).shape == (0, 400)
    assert head_linear(states, weight).shape == head_combine(states, weight.mT.contiguous()).shape
    assert head_linear(states, weight).shape == (0, 2, 400)
    assert rms_norm(states[:, 0], weight[0, 0], 1e-5).shape == (0, 200)


def test_shapes_that_do_not_fit_are_refused():
    states, weight = draw(1, 2, 300), draw(2, 400, 299, seed=1)
    with pytest.raises(ValueError, match="do not fit"):
        linear(states[:, 0], weight[0])
    with pytest.raises(ValueError, match="do not fit"):
        head_linear(states, weight)
    with pytest.raises(ValueError, match="do not fit"):
        head_combine(states, weight)
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(states[:, 0], weight[0, 0], 1e-5)


def test_other_dtypes_and_layouts_go_to_torch(taken):
    for dtype in (torch.float64, torch.float16):
        states, weight = draw(2, 300, dtype=dtype), draw(300, 300, dtype=dtype, seed=1)
        torch.testing.assert_close(linear(states, weight), F.linear(states, weight))
        expected = F.rms_norm(states, (300,), eps=1e-5) * weight[0]
        torch.testing.assert_close(rms_norm(states, weight[0], 1e-5), expected)
    states, weight = draw(300, 2).T, draw(300, 300, seed=1)
    torch.testing.assert_close(linear(states, weight), F.linear(states, weight))
    torch.testing.assert_close(linear(draw(2, 300), weight.T), F.linear(draw(2, 300), weight.T))
    assert not taken


def test_weights_cut_from_a_wider_matrix():
    states, weight = draw(2, 300), draw(300, 310, seed=1)
    assert_close(linear(states, weight[:, :300]), states.double() @ weight[:, :300].double().T)
    heads = draw(2, 3, 150), draw(3, 150, 220, seed=1)[..., :200]
    assert_close(head_combine(*heads), torch.einsum("thi,hio->tho", *(one.double() for one in heads)))


def test_gradients_flow_through_few_tokens(taken):
    states, weight = draw(2, 2, 300).requires_grad_(), draw(2, 400, 300, seed=1).requires_grad_()
    norm = draw(300, seed=2).requires_grad_()
    output = (
        linear(rms_norm(states[:, 0], norm, 1e-5), weight[0]).sum()
        + head_linear(states, weight).pow(2).sum()
        + head_combine(states, weight.mT).pow(2).sum()
    )
    output.backward()
    assert not taken
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in (states, weight, norm))
    with torch.no_grad():
        linear(states[:, 0], weight[0])
    assert taken == ["linear_native"]
