"""The indexer's loss on a GPU, against the plain version in float64."""

import pytest
import torch
from torch import Tensor

from megaspan.ops.index_loss import index_loss, index_loss_reference
from tests.ops.index_loss_cases import Case, gradients, make_case

pytest.importorskip("triton")

from megaspan.ops.index_loss.gpu import index_loss_gpu

GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("poisoned_memory")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def expected(case: Case) -> tuple[Tensor, list[Tensor]]:
    exact = case.to(dtype=torch.float64)
    learnt = tuple(tensor.requires_grad_() for tensor in (exact.query, exact.weights, exact.keys))
    loss = index_loss_reference(*exact.operands)
    return loss.detach(), [g.nan_to_num(0.0) / 2 for g in gradients(loss, learnt)]


def assert_matches(case: Case, device: str, budget: int = GIB) -> None:
    loss, grads = index_loss_gpu(*case.to(device).operands, budget, True)
    wanted, wanted_grads = expected(case)
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.bfloat16]
    torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-3, atol=1e-4)
    for actual, theirs in zip(grads, wanted_grads, strict=True):
        assert (actual.double().cpu() - theirs).abs().max() <= 1e-2 * theirs.abs().max()


def small_case(**sizes) -> Case:
    return make_case(**({"queries": 6, "index_heads": 16} | sizes), dtype=torch.bfloat16)


@pytest.mark.parametrize("slots", [None, 40, 65], ids=["all", "selection", "more slots than rows at once"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"index_heads": 3, "index_width": 20, "heads": 18, "width": 40, "served": 1}],
    ids=["", "odd sizes"],
)
def test_loss_and_gradients_equal_the_plain_version(kernel_device, sizes, slots):
    assert_matches(small_case(slots=slots, **sizes), kernel_device)


@pytest.mark.parametrize("slots", [None, 20])
def test_tiles_of_any_size_give_the_same(kernel_device, slots):
    assert_matches(small_case(slots=slots, queries=3), kernel_device, budget=1)


@pytest.mark.parametrize("slots", [None, 8])
def test_queries_that_see_nothing_add_nothing(kernel_device, slots):
    case = small_case(slots=slots, queries=2)
    case.seen = torch.zeros(2, dtype=torch.int64) if slots is None else torch.full((2, slots), -1)
    case.keys[:] = torch.nan
    loss, grads = index_loss_gpu(*case.to(kernel_device).operands, GIB, True)
    assert not loss
    assert not any(g.any() for g in grads)


def test_a_loss_alone_and_nothing_at_all(kernel_device):
    case = small_case().to(kernel_device)
    loss, none = index_loss_gpu(*case.operands, GIB, False)
    assert not none
    assert loss.equal(index_loss_gpu(*case.operands, GIB, True)[0])
    case.query, case.weights, case.seen = case.query[:0], case.weights[:0], case.seen[:0]
    case.layers = [(query[:0], rows) for query, rows in case.layers]
    assert not index_loss_gpu(*case.operands, GIB, True)[0]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("slots", [None, 2048], ids=["all", "selection"])
def test_real_widths_through_autograd(slots):
    case = make_case(9, 32, 128, 64, 576, 3000, 3, slots, torch.bfloat16)
    case.scale = 256**-0.5
    assert_matches(case, "cuda")
    on_gpu = case.to("cuda")
    learnt = tuple(tensor.requires_grad_() for tensor in (on_gpu.query, on_gpu.weights, on_gpu.keys))
    once = gradients(index_loss(*on_gpu.operands), learnt)
    again = gradients(index_loss(*on_gpu.operands), learnt)
    _, direct = index_loss_gpu(*on_gpu.to("cuda").operands, GIB, True)
    assert all(a.equal(b) for a, b in zip(once, again, strict=True))
    assert all(a.equal(2 * b) for a, b in zip(once, direct, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("slots", [None, 2048], ids=["all", "selection"])
def test_rows_beyond_two_to_the_31(slots):
    """Latent rows of 576 numbers; the queries see few of the first rows, or select the last ones."""
    length = (1 << 31) // 576 + 4000
    case = make_case(4, 32, 128, 64, 576, 4000, 1, slots, torch.bfloat16).to("cuda")
    shift = length - 4000 if slots else 0

    def placed(small: Tensor) -> Tensor:
        large = torch.empty(length, small.shape[1], dtype=small.dtype, device="cuda")
        large[shift : shift + len(small)] = small
        return large

    loss, grads = index_loss_gpu(*case.operands, 8 * GIB, True)
    case.keys, case.layers = placed(case.keys), [(q, placed(rows)) for q, rows in case.layers]
    case.seen = case.seen.where(case.seen < 0, case.seen + shift)
    far_loss, far_grads = index_loss_gpu(*case.operands, 8 * GIB, True)
    assert far_loss.equal(loss)
    assert all(a.equal(b) for a, b in zip(grads[:2], far_grads[:2], strict=True))
    assert far_grads[2][shift : shift + 4000].equal(grads[2])
