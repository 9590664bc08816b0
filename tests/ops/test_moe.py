"""Routed experts: every version against the plain loop."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, silu

from megaspan.ops.moe import moe, moe_grouped, moe_reference, native, swiglu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
needs_native = pytest.mark.skipif(
    not native.supports(torch.empty(1, 1), slots=1, experts=1), reason="no C compiler here"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
VERSIONS = [
    pytest.param(moe_grouped, id="grouped"),
    pytest.param(native.moe_native, id="native", marks=needs_native),
]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass
class Case:
    hidden: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.hidden, self.expert_ids, self.expert_weights, self.gate_up_proj, self.down_proj


def make_case(
    tokens: int = 5,
    slots: int = 2,
    experts: int = 6,
    width: int = 24,
    inner: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random operands; the experts that no token goes to are NaN."""
    generator = torch.Generator().manual_seed(seed)
    expert_ids = torch.stack(
        [torch.randperm(experts, generator=generator)[:slots] for _ in range(tokens)]
        or [torch.empty(0, dtype=torch.int64)]
    )[:tokens].reshape(tokens, slots)
    gate_up_proj = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
    down_proj = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
    unused = torch.ones(experts, dtype=torch.bool)
    unused[expert_ids] = False
    gate_up_proj[unused] = torch.nan
    down_proj[unused] = torch.nan
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weights = torch.rand(tokens, slots, generator=generator)
    return Case(hidden, expert_ids, weights, gate_up_proj.to(dtype), down_proj.to(dtype))


@st.composite
def cases(draw) -> Case:
    experts = draw(st.integers(1, 9))
    return make_case(
        tokens=draw(st.integers(0, 20)),
        slots=draw(st.integers(1, experts)),
        experts=experts,
        width=draw(st.integers(1, 70)),
        inner=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=25)
@given(case=cases())
def test_equals_the_plain_loop(version, case):
    assert_close(version(*case.operands), moe_reference(*case.operands))


@pytest.mark.parametrize("version", VERSIONS)
def test_large_gates_saturate(version):
    case = make_case()
    case.hidden *= 300
    torch.testing.assert_close(version(*case.operands), moe_reference(*case.operands), rtol=1e-4, atol=1e-2)


@needs_native
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "one by one"])
@settings(max_examples=15)
@given(case=cases(), data=st.data())
def test_a_token_does_not_depend_on_the_others(compiled, case, data):
    """Bit for bit, in batch-invariant mode: any stretch of the tokens, so other groups at every expert."""
    tokens = len(case.hidden)
    first = data.draw(st.integers(0, tokens))
    few = slice(first, data.draw(st.integers(first, tokens)))
    gate, up = case.gate_up_proj[0].nan_to_num(0.5).chunk(2)
    down = case.down_proj[0].nan_to_num(0.5)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "can_take", lambda *_: False)
        together = moe(*case.operands, invariant=True)
        alone = moe(*(operand[few] for operand in case.operands[:3]), *case.operands[3:], invariant=True)
        assert alone.equal(together[few])
        plain = swiglu(case.hidden, gate, up, down, invariant=True)
        assert swiglu(case.hidden[few], gate, up, down, invariant=True).equal(plain[few])
    assert_close(together, moe_reference(*case.operands))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_tokens_do_not_matter(dtype):
    """More tokens than the scratch space holds at once: 32 MiB."""
    case = make_case(tokens=700, slots=4, experts=16, width=3000, inner=7, dtype=dtype)
    together = native.moe_native(*case.operands)
    for token in (0, 600, 699):
        alone = slice(token, token + 1)
        output = native.moe_native(
            case.hidden[alone], case.expert_ids[alone], case.expert_weights[alone], *case.operands[3:]
        )
        assert output.equal(together[alone])


@needs_native
def test_native_does_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(native, "WORTH_THREADS", 0)
    case = make_case(tokens=3, width=65, inner=77)
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(native.moe_native(*case.operands))
    finally:
        torch.set_num_threads(before)
    assert outputs[0].equal(outputs[1])
    assert outputs[0].equal(outputs[2])


@needs_native
@pytest.mark.parametrize("expert", [-1, 6, 1 << 40])
def test_native_refuses_an_expert_that_does_not_exist(expert):
    case = make_case()
    case.expert_ids[1, 1] = expert
    with pytest.raises(IndexError, match=r"outside 0\.\.5"):
        native.moe_native(*case.operands)


@needs_native
def test_native_refuses_mixed_dtypes():
    case = make_case()
    case.down_proj = case.down_proj.bfloat16()
    with pytest.raises(TypeError, match="one dtype"):
        native.moe_native(*case.operands)


def test_gradients_pass_the_finite_difference_check():
    case = make_case(tokens=4, slots=2, experts=3, width=3, inner=2)
    inputs = [
        tensor.nan_to_num(0.5).double().requires_grad_()
        for tensor in (case.hidden, case.expert_weights, case.gate_up_proj, case.down_proj)
    ]

    def mix(hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return moe(hidden, case.expert_ids, weights, gate_up, down)

    assert torch.autograd.gradcheck(mix, inputs)


def test_gradients_ignore_experts_without_tokens():
    case = make_case(tokens=2, slots=1, experts=6)
    case.gate_up_proj.requires_grad_()
    moe(*case.operands).sum().backward()
    used = torch.zeros(6, dtype=torch.bool)
    used[case.expert_ids] = True
    grad = case.gate_up_proj.grad
    assert grad is not None
    assert grad[used].abs().amax((1, 2)).gt(0).all()
    assert grad[~used].eq(0).all()


@needs_native
@pytest.mark.parametrize(("tokens", "times"), [(192, 1), (193, 0)])
def test_dispatcher_takes_the_compiled_version_for_few_tokens(monkeypatch, tokens, times):
    case = make_case(tokens=tokens, slots=2, experts=6)
    calls = []
    monkeypatch.setattr(native, "moe_native", lambda *operands: calls.append(operands))
    moe(*case.operands)
    assert len(calls) == times
    moe(*case.operands, invariant=True)
    assert len(calls) == (times := times + 1)
    case.hidden.requires_grad_()
    assert moe(*case.operands).requires_grad
    assert len(calls) == times


@settings(max_examples=30)
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 70),
    inner=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_swiglu_equals_its_formula(tokens, width, inner, dtype):
    case = make_case(tokens=max(tokens, 1), slots=1, experts=1, width=width, inner=inner, dtype=dtype)
    hidden, (gate, up), down = case.hidden[:tokens], case.gate_up_proj[0].chunk(2), case.down_proj[0]
    exact = linear(
        silu(linear(hidden.float(), gate.float())) * linear(hidden.float(), up.float()), down.float()
    )
    assert_close(swiglu(hidden, gate, up, down), exact.to(dtype))


@pytest.mark.gpu
@needs_gpu
def test_grouped_product_on_the_gpu_with_gradients():
    case = make_case(tokens=333, slots=4, experts=16, width=256, inner=128, dtype=torch.bfloat16)
    grads = []
    for version in (moe, moe_reference):
        inputs = [tensor.cuda().requires_grad_(tensor.is_floating_point()) for tensor in case.operands]
        output = version(*inputs)
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        grads.append([output, *torch.autograd.grad(output.float().square().sum(), differentiable)])
    for actual, expected in zip(*grads, strict=True):
        assert (actual.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()
