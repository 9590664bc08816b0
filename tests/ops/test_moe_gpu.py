"""Routed experts on a GPU: against the plain loops, whatever the routing, and alone as in company."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from megaspan.ops.moe import moe, moe_fp8, moe_fp8_reference, moe_reference, swiglu
from megaspan.ops.quant import quantize_blocks
from tests.ops.test_moe import Case, make_case

gpu = pytest.importorskip("megaspan.ops.moe.gpu", reason="no Triton here")
from megaspan.ops.moe import gpu_few, gpu_many, gpu_routing  # noqa: E402
from megaspan.ops.moe.gpu_product import Tile  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def small_tiles(kernel_device, monkeypatch):
    """Tiles so small that small cases have several, where the interpreter runs them: it takes any size."""
    if kernel_device == "cpu":
        for module in (gpu_many, gpu_few):
            monkeypatch.setattr(module, "GATE_UP", Tile(4, 16, 16, 1, 1))
            monkeypatch.setattr(module, "DOWN", Tile(4, 16, 16, 1, 1))
        monkeypatch.setattr(gpu_routing, "BLOCK", 32)


def on(device: str, case: Case) -> Case:
    return Case(*(operand.to(device) for operand in case.operands))


def difference(actual: Tensor, expected: Tensor) -> float:
    """Of the Frobenius norms; NaN where either holds one."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


@st.composite
def cases(draw) -> Case:
    """Of few shapes, as each is compiled on its own."""
    experts, slots = draw(st.sampled_from([(1, 1), (5, 2)]))
    width, inner = draw(st.sampled_from([(8, 40), (40, 16), (24, 24)]))
    return make_case(
        tokens=draw(st.sampled_from([0, 1, 2, 5, 9])),
        slots=slots,
        experts=experts,
        width=width,
        inner=inner,
        dtype=torch.bfloat16,
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("invariant", [False, True])
@settings(max_examples=6)
@given(case=cases())
def test_equals_the_plain_loop(kernel_device, invariant, case):
    case = on(kernel_device, case)
    output = gpu.moe_gpu(*case.operands, invariant=invariant)
    assert output.dtype == torch.bfloat16
    assert output.shape == case.hidden.shape
    assert not output.numel() or difference(output, moe_reference(*case.operands)) < 6e-3


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("invariant", [False, True])
def test_all_tokens_go_to_one_expert_and_hidden_states_lie_apart(kernel_device, invariant):
    case = make_case(tokens=11, slots=1, experts=4, width=24, inner=16, dtype=torch.bfloat16)
    projections = [weight.nan_to_num(0.2) for weight in case.operands[3:]]
    wide = torch.full((11, 40), torch.nan, dtype=torch.bfloat16)
    wide[:, 8:32] = case.hidden
    case = Case(wide[:, 8:32], torch.full((11, 1), 2), case.expert_weights, *projections)
    expected = moe_reference(*case.operands)
    for hidden in (wide.to(kernel_device)[:, 8:32], case.hidden.T.contiguous().to(kernel_device).T):
        output = gpu.moe_gpu(hidden, *on(kernel_device, case).operands[1:], invariant=invariant)
        assert difference(output, expected) < 6e-3


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("invariant", [False, True])
def test_a_pair_without_an_expert_adds_nothing(kernel_device, invariant):
    case = make_case(tokens=6, slots=2, experts=4, width=16, inner=16, dtype=torch.bfloat16)
    without = case.expert_weights.clone()
    without[1, 0] = without[4] = 0
    expected = moe_reference(*replace(case, expert_weights=without).operands)
    case.expert_ids[1, 0], case.expert_ids[4] = -1, torch.tensor([4, 1 << 40])
    output = gpu.moe_gpu(*on(kernel_device, case).operands, invariant=invariant)
    assert difference(output, expected) < 6e-3
    assert output[4].eq(0).all()


@settings(max_examples=10)
@given(st.integers(1, 6), st.integers(1, 90), st.randoms(use_true_random=False))
def test_pairs_are_sorted_by_expert_in_a_stable_way(kernel_device, experts, pairs, random):
    ids = torch.tensor([[random.randint(-1, experts)] for _ in range(pairs)], device=kernel_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_routing, "BLOCK", 16)
        order, starts = gpu_routing.sort_pairs(ids, experts)
    flat = ids.flatten().tolist()
    expected = [pair for expert in range(experts) for pair in range(pairs) if flat[pair] == expert]
    assert starts.tolist() == [sum(0 <= i < expert for i in flat) for expert in range(experts + 1)]
    assert order[: len(expected)].tolist() == expected


def test_operands_that_do_not_fit_are_refused(kernel_device):
    case = on(kernel_device, make_case(dtype=torch.bfloat16, width=16, inner=16))
    with pytest.raises(ValueError, match="do not fit"):
        gpu.moe_gpu(case.hidden[:2], *case.operands[1:])
    with pytest.raises(ValueError, match="do not fit"):
        gpu.moe_gpu(*case.operands[:3], case.gate_up_proj[:, :16], case.down_proj)


def in_fp8(case: Case) -> tuple[Tensor, ...]:
    """The operands of `moe_fp8`; experts that no token goes to have NaN scales."""
    weights = []
    for projection in (case.gate_up_proj, case.down_proj):
        unused = projection.isnan().any((1, 2))
        blocks = [quantize_blocks(matrix.nan_to_num(0.5)) for matrix in projection]
        scales = torch.stack([scale for _, scale in blocks])
        scales[unused] = torch.nan
        weights += [torch.stack([matrix for matrix, _ in blocks]), scales]
    return case.hidden, case.expert_ids, case.expert_weights, *weights


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("tokens", "width", "inner"), [(3, 144, 128), (5, 128, 256)])
def test_fp8_equals_the_plain_loop(kernel_device, invariant, tokens, width, inner):
    case = make_case(tokens=tokens, slots=2, experts=3, width=width, inner=inner, dtype=torch.bfloat16)
    case.hidden[0] *= 100  # other scales for other tokens, and for other blocks of the weights
    case.gate_up_proj[:, :128] *= 3
    case.down_proj[:, :, -128:] *= 5
    operands = in_fp8(case)
    output = gpu.moe_fp8_gpu(*(operand.to(kernel_device) for operand in operands), invariant=invariant)
    expected = moe_fp8_reference(*operands)
    for token in range(tokens):
        assert difference(output[token], expected[token]) < 2e-2
    assert moe_fp8(*operands).equal(expected)


def test_fp8_reference_is_near_the_weights_it_was_made_of():
    case = make_case(tokens=4, slots=2, experts=3, width=144, inner=128)
    assert difference(moe_fp8_reference(*in_fp8(case)), moe_reference(*case.operands)) < 9e-2


def test_states_are_rounded_as_latent_rows(kernel_device):
    from megaspan.ops.quant import encode_latent_rows

    states = torch.randn(3, 300, device=kernel_device)
    states[1], states[2, 128:256] = states[1] * 1e-30, 0
    values, scales = gpu.quantize_states(states)
    packed = torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), 1)
    assert packed.cpu().equal(encode_latent_rows(states.cpu(), 300))


# At real widths, on a GPU.


@pytest.fixture(scope="module")
def real_case() -> Case:
    """300 tokens at GLM-5.2's widths; the last third of the 256 experts get no token and are NaN."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    torch.manual_seed(0)
    gate_up = torch.empty(256, 4096, 6144, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(256, 6144, 2048, dtype=torch.bfloat16, device="cuda")
    for projection in (gate_up, down):
        for matrix in projection[:170]:
            matrix.normal_(std=matrix.shape[1] ** -0.5)
        projection[170:] = torch.nan
    ids = torch.rand(300, 170, device="cuda").topk(8, 1).indices
    hidden = torch.randn(300, 6144, device="cuda").bfloat16()
    return Case(hidden, ids, torch.rand(300, 8, device="cuda"), gate_up, down)


@dataclass
class Version:
    """The GPU's version and the plain loop, the routed tokens and the weights of the projections."""

    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    tolerance: float
    routed: tuple[Tensor, Tensor, Tensor]
    weights: tuple[Tensor, ...]

    def of(self, tokens: slice, **options: bool) -> Tensor:
        return self.function(*(operand[tokens] for operand in self.routed), *self.weights, **options)

    def expected(self, tokens: slice) -> Tensor:
        return self.reference(*(operand[tokens] for operand in self.routed), *self.weights)


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def real(request, real_case) -> Version:
    routed = real_case.operands[:3]
    if request.param == "bf16":
        return Version(gpu.moe_gpu, moe_reference, 6e-3, routed, real_case.operands[3:])
    return Version(gpu.moe_fp8_gpu, moe_fp8_reference, 2e-2, routed, in_fp8(real_case)[3:])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 65, 300])
def test_real_widths(real, tokens):
    output = real.of(slice(tokens))
    last = slice(max(0, tokens - 3), tokens)
    assert difference(output[last], real.expected(last)) < real.tolerance
    for _ in range(3):
        assert real.of(slice(tokens)).equal(output)


@pytest.mark.gpu
def test_a_token_alone_is_as_in_company(real):
    together = real.of(slice(None), invariant=True)
    for tokens in (1, 2, 17):
        assert real.of(slice(tokens), invariant=True).equal(together[:tokens])
    # Whole tiles, and outputs of pairs past 2^31 numbers.
    crowd = (operand.repeat(151, 1) for operand in real.routed)
    assert real.function(*crowd, *real.weights, invariant=True)[-300:].equal(together)


@pytest.mark.gpu
def test_few_tokens_have_the_bits_of_many(real):
    few = slice(64)
    assert real.of(few).equal(real.of(few, invariant=True))


@pytest.mark.gpu
def test_no_launch_waits_and_a_graph_repeats_them(real):
    """With other tokens in the same memory: what goes where is found when the graph runs."""
    hidden, ids, weights = (operand[:17].clone() for operand in real.routed)
    for invariant in (False, True):
        real.function(hidden, ids, weights, *real.weights, invariant=invariant)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = real.function(hidden, ids, weights, *real.weights, invariant=invariant)
        for tokens in (slice(17), slice(100, 117)):
            for operand, source in zip((hidden, ids, weights), real.routed, strict=True):
                operand.copy_(source[tokens])
            graph.replay()
            assert output.equal(real.of(tokens, invariant=invariant))


@pytest.mark.gpu
def test_the_dispatcher_takes_it_unless_there_are_gradients(real_case):
    operands = *(operand[:3] for operand in real_case.operands[:3]), *real_case.operands[3:]
    assert moe(*operands, invariant=True).equal(gpu.moe_gpu(*operands, invariant=True))
    hidden = operands[0].clone().requires_grad_()
    assert moe(hidden, *operands[1:]).requires_grad
    small = make_case(width=144, inner=128, dtype=torch.bfloat16)
    scaled = tuple(operand.cuda() for operand in in_fp8(small))
    assert moe_fp8(*scaled).equal(gpu.moe_fp8_gpu(*scaled))
    gate, up, down = (torch.randn(side, device="cuda").bfloat16() for side in ((64, 32), (64, 32), (32, 64)))
    states = torch.randn(3, 32, device="cuda").bfloat16()
    expected = silu(states.float() @ gate.float().T) * (states.float() @ up.float().T) @ down.float().T
    assert difference(swiglu(states, gate, up, down), expected) < 1e-2
    together = swiglu(states, gate, up, down, invariant=True)
    assert difference(together, expected) < 1e-2
    assert swiglu(states[1:2], gate, up, down, invariant=True).equal(together[1:2])
