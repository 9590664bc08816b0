"""Gradients of sparse latent attention on a GPU, against autograd through the plain loop in float64."""

import pytest
import torch
from torch import Tensor

from tests.ops.test_sparse_mla import Case, make_case

pytest.importorskip("triton")

from megaspan.ops.gpu_row_sums import sum_by_row
from megaspan.ops.sparse_mla import sparse_mla
from megaspan.ops.sparse_mla.gpu_backward import sparse_mla_backward

GIB = 1 << 30
TOLERANCE = 1e-2  # of the largest gradient: probabilities and contributions are rounded to bf16

pytestmark = pytest.mark.usefixtures("poisoned_memory")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def attend(case: Case, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, H, V] and the logarithms of the sums [T, H], of the precision of the operands."""
    empty = case.selected < 0
    gathered = rows[case.selected.clamp(min=0)].where(~empty[..., None], 0.0)
    scores = case.scale * torch.einsum("thw,tkw->thk", query, gathered)
    scores = scores.masked_fill(empty[:, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(empty.all(1)[:, None, None], 0.0)
    output = torch.einsum("thk,tkv->thv", weights, gathered[..., : case.value_width])
    return output, scores.logsumexp(-1)


def gradients(
    case: Case, device: str, budget: int = GIB, deterministic: bool = True, seed: int = 0
) -> list[Tensor]:
    """Those of the kernels: of the query, and of the rows that somebody selected."""
    output, lse = attend(case, case.query.double(), case.rows.double())
    grad_output = grad_of(output, seed)
    tensors = [case.query, case.rows, case.selected]
    query, rows, selected = (tensor.to(device) for tensor in tensors)
    results = output.to(case.query.dtype), lse.float(), grad_output
    operands = (query, rows, selected, case.value_width, case.scale)
    rest = (tensor.to(device) for tensor in results)
    grads = sparse_mla_backward(*operands, *rest, budget, deterministic)
    assert [g.dtype for g in grads] == [query.dtype, rows.dtype]
    return [g.cpu() for g in grads]


def grad_of(output: Tensor, seed: int) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def expected(case: Case, seed: int = 0) -> list[Tensor]:
    unseen = case.rows.isnan().all(1)
    query, rows = case.query.double().requires_grad_(), case.rows.double().nan_to_num(0.0).requires_grad_()
    output, _ = attend(case, query, rows)
    grads = torch.autograd.grad(output, (query, rows), grad_of(output, seed).double())
    assert not grads[1][unseen].any()
    return list(grads)


def assert_close(actual: list[Tensor], wanted: list[Tensor]) -> None:
    for a, w in zip(actual, wanted, strict=True):
        assert (a.double() - w).abs().max() <= TOLERANCE * w.abs().max() + 1e-5


def small_case(**sizes) -> Case:
    shape = {"tokens": 3, "heads": 16, "width": 48, "value_width": 32, "slots": 40, "row_count": 60}
    return make_case(**(shape | sizes), dtype=torch.bfloat16)


@pytest.mark.parametrize("deterministic", [True, False], ids=["sorted", "atomic"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"slots": 65}, {"heads": 20, "slots": 1}, {"heads": 3, "width": 80, "value_width": 48}],
    ids=["", "a slot more than a block", "one slot", "odd heads and widths"],
)
def test_gradients_equal_autograd(kernel_device, sizes, deterministic):
    """Rows that nobody selected are NaN, and empty slots lie at the end of most selections."""
    case = small_case(**sizes)
    assert_close(gradients(case, kernel_device, deterministic=deterministic), expected(case))


def test_tiles_of_any_size_give_the_same(kernel_device):
    case = small_case()
    assert_close(gradients(case, kernel_device, budget=1), expected(case))


def test_a_token_that_selected_nothing_and_slots_out_of_order(kernel_device):
    case = small_case()
    case.selected[1] = -1
    case.selected[2] = case.selected[2].flip(0)
    case.selected[0, 1] = case.selected[0, 0]  # counts twice
    case.rows = case.rows.nan_to_num(0.5)
    actual = gradients(case, kernel_device)
    assert not actual[0][1].any()
    assert_close(actual, expected(case))


@pytest.mark.parametrize("shape", [(0, 40), (3, 0)])
def test_nothing_at_all(kernel_device, shape):
    tokens, slots = shape
    query = torch.ones(tokens, 16, 48, dtype=torch.bfloat16, device=kernel_device)
    rows = torch.full((5, 48), torch.nan, dtype=torch.bfloat16, device=kernel_device)
    selected = torch.zeros(tokens, slots, dtype=torch.int64, device=kernel_device)
    lse = torch.zeros(tokens, 16, device=kernel_device)
    grads = sparse_mla_backward(query, rows, selected, 32, 1.0, query[..., :32], lse, query[..., :32], GIB)
    assert [g.shape for g in grads] == [query.shape, rows.shape]
    assert not any(g.any() for g in grads)


def test_operands_that_are_views(kernel_device):
    case = small_case()
    wide = torch.full((len(case.rows), 96), torch.nan, dtype=torch.bfloat16)
    wide[:, 16:64] = case.rows
    case.rows = wide[:, 16:64]
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(gradients(case, kernel_device), expected(case))


@pytest.mark.parametrize("width", [1, 24, 128, 576, 1030])
@pytest.mark.parametrize("add", [False, True])
def test_sums_by_row(kernel_device, width, add):
    random = torch.Generator().manual_seed(width)
    contributions = torch.randn(70, width, generator=random)
    numbers = torch.randint(-1, 5, (70,), generator=random)
    numbers[20:50] = 3  # more than a program reads at once
    contributions[numbers < 0] = torch.nan
    before = torch.randn(9, width, generator=random)
    total = before.clone().to(kernel_device)
    sum_by_row(contributions.to(kernel_device), numbers.to(kernel_device), total, add)
    named = numbers >= 0
    wanted = before * add
    wanted.index_add_(0, numbers[named], contributions[named])
    torch.testing.assert_close(total.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("deterministic", [True, False], ids=["sorted", "atomic"])
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("slots", [31, 32, 130, 512])
def test_real_widths(heads, slots, deterministic):
    case = make_case(7, heads, 576, 512, slots, 900, torch.bfloat16)
    assert_close(gradients(case, "cuda", deterministic=deterministic), expected(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_gradients_through_the_operation(heads):
    case = make_case(40, heads, 576, 512, 100, 900, torch.bfloat16)
    query, rows = (tensor.cuda().requires_grad_() for tensor in (case.query, case.rows))
    output = sparse_mla(query, rows, case.selected.cuda(), case.value_width, case.scale)
    grads = torch.autograd.grad(output, (query, rows), grad_of(output.cpu(), 0).cuda())
    assert_close([g.cpu() for g in grads], expected(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_equal_bits_on_repeat_and_in_tiles(heads):
    """One row is selected by every token, so that its sum is long; the tile does not change a query's."""
    case = make_case(300, heads, 576, 512, 256, 2000, torch.bfloat16)
    case.rows = case.rows.nan_to_num(0.5)
    case.selected[:, 0] = 5
    first, again = gradients(case, "cuda"), gradients(case, "cuda")
    tiled = gradients(case, "cuda", budget=140 * 256 * (4 * heads + 2 * 576 + 32))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert tiled[0].equal(first[0])
    assert_close([tiled[1]], [first[1].double()])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("deterministic", [True, False], ids=["sorted", "atomic"])
@pytest.mark.parametrize("heads", [16, 64])
def test_rows_and_contributions_beyond_two_to_the_31(heads, deterministic):
    case = make_case(2100, heads, 576, 512, 2048, 5000, torch.bfloat16)
    far = (1 << 31) // 576 + 10
    query, selected = case.query.cuda(), case.selected.cuda()
    near_rows = case.rows.nan_to_num(0.5).cuda()
    rows = torch.empty(far + len(near_rows), 576, dtype=torch.bfloat16, device="cuda")
    rows[far:] = near_rows
    output = torch.randn(2100, heads, 512, device="cuda").bfloat16()
    lse = torch.full((2100, heads), 3.0, device="cuda")
    operands = (512, 0.02, output, lse, output.flip(0), 16 * GIB, deterministic)
    wanted = sparse_mla_backward(query, near_rows, selected, *operands)
    actual = sparse_mla_backward(query, rows, selected.where(selected < 0, selected + far), *operands)
    assert actual[0].equal(wanted[0])
    assert_close([actual[1][far:].cpu()], [wanted[1].double().cpu()])
    assert not actual[1][:far].any()
