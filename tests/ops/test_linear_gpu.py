"""Products on a GPU: against sums in fp64; a token has the same bits whatever the tile and other tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops import linear as ops

gpu = pytest.importorskip("megaspan.ops.linear.gpu", reason="no Triton here")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
BF16 = torch.bfloat16
TILES = (*gpu.FEW, *gpu.MANY)
tokens_around_tiles = st.sampled_from([0, 1, 2, 17, 64, 65])
widths = st.sampled_from([8, 64, 136])
columns_around_tiles = st.sampled_from([1, 16, 33, 70])
some = settings(max_examples=12)


def normal(*shape: int, device: str, seed: int = 0) -> Tensor:
    """bf16 numbers of variance 1, cut from a tensor of NaN that is 8 wider on each side."""
    wide = torch.full((*shape[:-1], shape[-1] + 16), torch.nan)
    wide[..., 8:-8] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return wide.to(device, BF16)[..., 8:-8]


def whole(*shape: int, device: str, seed: int = 0) -> Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(device, BF16)


def assert_close(actual: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """As near to the number in fp64 as fp32 sums and so many roundings to the result's dtype leave it."""
    assert actual.shape == exact.shape
    tolerance = roundings * 2**-8 if actual.dtype == BF16 else 1e-4
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)


def assert_gates(actual: Tensor, states: Tensor, gate: Tensor, up: Tensor) -> None:
    """Both sums are rounded, the activation and the product; the activation makes its argument's more."""
    gated, other = states.double() @ gate.double().T, states.double() @ up.double().T
    assert_close(actual, torch.nn.functional.silu(gated) * other, roundings=5)


@some
@given(tokens_around_tiles, widths, columns_around_tiles, st.sampled_from([BF16, torch.float32]))
def test_linear_equals_the_exact_product(kernel_device, tokens, width, columns, dtype):
    states = normal(tokens, width, device=kernel_device)
    weight = normal(columns, width, device=kernel_device, seed=1)
    actual = gpu.linear_gpu(states, weight, dtype)
    assert actual.dtype == dtype
    assert_close(actual, states.double() @ weight.double().T)


@some
@given(tokens_around_tiles, st.sampled_from([1, 3]), widths, columns_around_tiles)
def test_head_products_equal_exact_ones(kernel_device, tokens, heads, width, columns):
    """The two halves of kv_b_proj are views of one matrix; beside them lies NaN."""
    states = normal(tokens, heads, width, device=kernel_device)
    weights = torch.full((heads, columns + 8, width), torch.nan, dtype=BF16, device=kernel_device)
    weights[:, 3:-5] = normal(heads, columns, width, device=kernel_device, seed=1)
    weights = weights[:, 3:-5]
    exact = torch.einsum("thi,hoi->tho", states.double(), weights.double())
    assert_close(gpu.head_linear_gpu(states, weights), exact)
    columns = 8 * columns
    weights = torch.full((heads, width + 8, columns), torch.nan, dtype=BF16, device=kernel_device)
    weights[:, :width] = normal(heads, width, columns, device=kernel_device, seed=2)
    weights = weights[:, :width]
    exact = torch.einsum("thi,hio->tho", states.double(), weights.double())
    assert_close(gpu.head_combine_gpu(states, weights), exact)


@some
@given(tokens_around_tiles, widths, columns_around_tiles)
def test_gate_up_equals_the_exact_one(kernel_device, tokens, width, columns):
    states = normal(tokens, width, device=kernel_device) / 4
    gate, up = (normal(columns, width, device=kernel_device, seed=seed) / 4 for seed in (1, 2))
    assert_gates(gpu.gate_up_gpu(states, gate, up), states, gate, up)


@pytest.mark.parametrize("tile", [*TILES, gpu.MANY[-1]._replace(band=2)])
def test_every_tile_computes_every_number(kernel_device, tile):
    states = whole(5 * 64 + 1, 24, device=kernel_device)
    weight = whole(2 * tile.columns + 3, 24, device=kernel_device, seed=1)
    expected = (states.double() @ weight.double().T).to(BF16)
    assert gpu.linear_gpu(states, weight, tile=tile).equal(expected)


def test_states_that_are_not_aligned(kernel_device):
    weight = whole(5, 8, device=kernel_device)
    for states in (whole(3, 9, device=kernel_device)[:, 1:], whole(8, 3, device=kernel_device).T):
        expected = (states.double() @ weight.double().T).to(BF16)
        assert gpu.linear_gpu(states, weight).equal(expected)
    row = whole(1, 8, device=kernel_device).expand(3, 8)
    assert gpu.linear_gpu(row, weight).equal((row.double() @ weight.double().T).to(BF16))


def test_shapes_that_do_not_fit_are_refused(kernel_device):
    states, weight = whole(2, 8, device=kernel_device), whole(4, 16, device=kernel_device)
    fitting = whole(4, 8, device=kernel_device)
    calls = (
        lambda: gpu.linear_gpu(states, weight),
        lambda: gpu.gate_up_gpu(states, fitting, fitting[:2]),
        lambda: gpu.gate_up_gpu(states, weight, weight),
        lambda: gpu.head_linear_gpu(states[:, None], fitting.expand(3, 4, 8)),
    )
    for call in calls:
        with pytest.raises(ValueError, match="do not fit"):
            call()


def test_tiles_are_chosen_for_as_many_programs_as_processors():
    def chosen(*sizes: int):
        return gpu.chosen_tile(gpu.FEW, gpu.MANY, *sizes)

    assert chosen(1, 16384) == gpu.FEW[0]
    assert chosen(8, 6144) == gpu.FEW[1]
    assert chosen(1, 512, 64) == gpu.FEW[0]
    assert chosen(64, 576) == gpu.FEW[-1]._replace(stages=2 * gpu.FEW[-1].stages)
    assert chosen(8192, 6144) == gpu.MANY[0]
    assert chosen(65, 6144).columns < 128


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_on_a_cpu(dtype):
    states, (gate, up) = torch.randn(3, 8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    sums = ops.linear_float32(states, gate)
    assert sums.dtype == torch.float32
    assert_close(sums, states.double() @ gate.double().T)
    assert_gates(ops.gate_up(states, gate, up), states, gate, up)


# Outputs and inputs of the projections of GLM-5.2: q_a, kv_a, wk, q_b, wq_b, o, gate or up, down, the
# router's, the shared expert's.
REAL = [
    (2048, 6144),
    (576, 6144),
    (128, 6144),
    (16384, 2048),
    (4096, 2048),
    (6144, 16384),
    (12288, 6144),
    (6144, 12288),
    (2048, 6144),
    (6144, 2048),
]
FEW = [slice(0, 1), slice(7, 8), slice(4095, 4096), slice(5, 7), slice(3, 10), slice(100, 116)]
MANY = [slice(9, 26), slice(64, 129), slice(1000, 1300), slice(0, 2500)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestAtRealWidths:
    @pytest.mark.parametrize(("columns", "width"), REAL)
    def test_a_token_does_not_depend_on_the_others(self, columns, width):
        states, weight = self.make(4096, width), self.make(columns, width) / width**0.5
        together = ops.linear(states, weight, invariant=True)
        assert_close(together[::97], states[::97].double() @ weight.double().T)
        for part in (*FEW, *MANY):
            assert ops.linear(states[part], weight, invariant=True).equal(together[part])
        assert ops.linear(states, weight, invariant=True).equal(together)

    @pytest.mark.parametrize(("columns", "width"), [(2048, 6144), (6144, 16384)])
    def test_no_tile_changes_a_bit(self, columns, width):
        states, weight = self.make(300, width), self.make(columns, width) / width**0.5
        expected = gpu.linear_gpu(states, weight, tile=TILES[0])
        for tile in TILES[1:]:
            assert gpu.linear_gpu(states, weight, tile=tile).equal(expected)

    def test_heads_do_not_depend_on_the_other_tokens(self):
        kv_b = self.make(64, 448, 512) / 512**0.5
        cases = (ops.head_combine, kv_b[:, :192], 192), (ops.head_linear, kv_b[:, 192:], 512)
        for operation, weights, width in cases:
            states = self.make(4096, 64, width)
            together = operation(states, weights, invariant=True)
            equation = "thi,hio->tho" if operation is ops.head_combine else "thi,hoi->tho"
            exact = torch.einsum(equation, states[::97].double(), weights.double())
            assert_close(together[::97], exact)
            for part in (*FEW, *MANY):
                assert operation(states[part], weights, invariant=True).equal(together[part])

    @pytest.mark.parametrize("inner", [2048, 12288])
    def test_gate_up_does_not_depend_on_the_other_tokens(self, inner):
        states, gate, up = self.make(4096, 6144), self.make(inner, 6144) / 80, self.make(inner, 6144) / 80
        together = ops.gate_up(states, gate, up, invariant=True)
        assert_gates(together[::97], states[::97], gate, up)
        for part in (*FEW, *MANY):
            assert ops.gate_up(states[part], gate, up, invariant=True).equal(together[part])

    @pytest.mark.parametrize("tokens", [1, 8, 64, 300])
    def test_sums_that_are_not_rounded(self, tokens):
        states, weight = self.make(tokens, 6144), self.make(32, 6144) / 80
        exact = states.double() @ weight.double().T
        for invariant in (True, False):
            actual = ops.linear_float32(states, weight, invariant=invariant)
            assert actual.dtype == torch.float32
            assert_close(actual, exact)
        many = ops.linear_float32(states.repeat(200, 1), weight, invariant=True)
        assert many[:tokens].equal(ops.linear_float32(states, weight, invariant=True))

    def test_gradients_take_pytorchs_way(self):
        states, weight = self.make(3, 64), self.make(8, 64).requires_grad_()
        ops.linear(states, weight).sum().backward()
        assert weight.grad is not None

    def test_replays_of_a_graph_read_what_is_there_then(self):
        states, weight = self.make(8, 6144).contiguous(), self.make(2048, 6144) / 80
        ops.linear(states, weight, invariant=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = ops.linear(states, weight, invariant=True)
        states.copy_(self.make(8, 6144, seed=5))
        graph.replay()
        assert output.equal(ops.linear(states, weight, invariant=True))

    def test_past_2_to_the_31_numbers(self):
        """In the output, then in the weights."""
        states, weight = self.make((1 << 31) // 154880 + 2, 64), self.make(154880, 64)
        output = ops.linear(states, weight, invariant=True)
        assert_close(output[-3:], states[-3:].double() @ weight.double().T)
        del output
        weight = torch.full(((1 << 31) // 6144 + 9, 6144), torch.nan, dtype=BF16, device="cuda")
        weight[-7:] = self.make(7, 6144) / 80
        states = self.make(1, 6144)
        output = ops.linear(states, weight, invariant=True)
        assert_close(output[:, -7:], states.double() @ weight[-7:].double().T)

    @staticmethod
    def make(*shape: int, seed: int = 0) -> Tensor:
        return normal(*shape, device="cuda", seed=seed + sum(shape))
