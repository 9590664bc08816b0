"""Sparse latent attention on a GPU, in Triton and for Hopper, against the plain formula in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.test_sparse_mla import Case, make_case

pytest.importorskip("triton")

from megaspan.ops.quant import decode_latent_rows, encode_latent_rows
from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import cuda, gpu, sparse_mla, visible_mla
from megaspan.ops.sparse_mla.gpu import sparse_mla_gpu, sparse_mla_triton, splits_for, visible_mla_gpu

HEADS, WIDTH, VALUES, SLOTS = 64, 576, 512, 2048  # of GLM-5.2
SCALE = 256**-0.5

pytestmark = pytest.mark.usefixtures("poisoned_memory")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def expected(case: Case) -> tuple[Tensor, Tensor]:
    """Output [T, H, V] and logarithms of the sums [T, H] in float64, of the rows as they are stored."""
    query, rows, selected, value_width, scale = case.operands
    outputs, sums = [], []
    for query_HW, numbers_K in zip(query.double(), selected, strict=True):
        chosen = rows[numbers_K[numbers_K >= 0]]
        if rows.dtype == torch.uint8:
            rope_width = query.shape[2] - value_width
            chosen = decode_latent_rows(chosen, value_width, rope_width, torch.bfloat16)
        scores_HK = scale * query_HW @ chosen.double().T
        outputs.append(scores_HK.softmax(-1) @ chosen[:, :value_width].double())
        sums.append(scores_HK.logsumexp(-1))
    return torch.stack(outputs), torch.stack(sums)


def assert_right(case: Case, actual: tuple[Tensor, Tensor]) -> None:
    output, lse = expected(case)
    assert actual[0].dtype == torch.bfloat16
    difference = actual[0].double() - output
    assert difference.norm() <= 3e-3 * output.norm()
    assert difference.abs().max() <= 2e-2 * output.abs().max()
    torch.testing.assert_close(actual[1].double(), lse, atol=1e-3, rtol=0)


def on(device: str, case: Case) -> Case:
    query, rows, selected = (each.to(device) for each in (case.query, case.rows, case.selected))
    return replace(case, query=query, rows=rows, selected=selected)


def small_case(fp8: bool = False, **sizes) -> Case:
    shape = {"tokens": 3, "heads": 16, "width": 48, "value_width": 32, "slots": 70, "row_count": 90}
    case = make_case(**(shape | sizes), dtype=torch.bfloat16)
    case.selected[0, 1:9:3] = -1  # holes, and not only a tail
    named = (~case.rows.isnan().all(1)).nonzero()[:, 0]
    case.selected[-1] = named[torch.arange(case.selected.shape[1]) % len(named)]  # full; a row may be twice
    return case.in_fp8() if fp8 else case


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"slots": 1, "heads": 3},
        {"slots": 64, "width": 176, "value_width": 144},
        {"slots": 150, "heads": 20, "width": 96, "value_width": 48},
    ],
    ids=["", "one slot", "partial group of values", "three steps, odd widths"],
)
def test_triton_equals_the_formula(kernel_device, sizes, fp8):
    """Rows that nobody selected are NaN or 255. Parts of a selection, some of them empty, make the same."""
    case = on(kernel_device, small_case(fp8, **sizes))
    for splits in (1, 2, None):
        assert_right(case, sparse_mla_triton(*case.operands, splits))


def test_triton_takes_parts_of_tensors(kernel_device):
    case = on(kernel_device, small_case())
    wide = torch.full((3, 32, 48), torch.nan, dtype=torch.bfloat16, device=kernel_device)
    wide[:, ::2] = case.query
    slots = case.selected.repeat_interleave(2, 1)[:, ::2]
    parts = wide[:, ::2], case.rows, slots, case.value_width, case.scale
    assert_right(case, sparse_mla_triton(*parts))


def test_triton_with_nothing(kernel_device):
    case = on(kernel_device, small_case())
    output, lse = sparse_mla_triton(case.query[:0], case.rows, case.selected[:0], 32, 0.3)
    assert output.shape == (0, 16, 32)
    assert lse.shape == (0, 16)
    case.selected[1] = -1
    for splits in (1, 2):
        output, lse = sparse_mla_triton(*case.operands, splits)
        assert not output[1].any()
        assert (lse[1] == -math.inf).all()


def test_bits_depend_on_splits_alone(kernel_device):
    """Not on the company, nor on how many empty slots follow."""
    case = on(kernel_device, small_case(slots=130))
    together = sparse_mla_triton(*case.operands, 2)
    longer = torch.cat((case.selected, torch.full_like(case.selected, -1)), 1)
    operands = case.rows, longer[1:2], case.value_width, case.scale
    alone = sparse_mla_triton(case.query[1:2], *operands, 2)
    for one, all_of_them in zip(alone, together, strict=True):
        assert torch.equal(one[0], all_of_them[1])


def test_visible_rows_are_a_selection_of_them(kernel_device, monkeypatch):
    """In tiles of tokens or not, and where the parts' results fit in memory for two tokens only."""
    case = on(kernel_device, small_case())
    case.rows[:] = torch.randn(case.rows.shape, device=kernel_device)
    table = RowTable(torch.tensor([[40, 0, 60], [60, 20, 0]], device=kernel_device), 20)
    sequence_ids, visible = (torch.tensor(each, device=kernel_device) for each in ([0, 1, 0], [57, 40, 1]))
    positions = torch.arange(64, device=kernel_device).expand(3, -1)
    numbers = table.rows(sequence_ids, positions.clamp(max=56)).where(positions < visible[:, None], -1)
    want = sparse_mla_triton(case.query, case.rows, numbers, 32, 0.3, gpu.INVARIANT_SPLITS)[0]
    operands = case.query, case.rows, table, sequence_ids, visible, 32, 0.3
    monkeypatch.setattr(cuda, "supports", lambda *_: False)
    assert torch.equal(visible_mla_gpu(*operands, 1 << 20), want)
    assert torch.equal(visible_mla_gpu(*operands, 1), want)
    monkeypatch.setattr(gpu, "PARTIAL_BYTES", 2 * gpu.INVARIANT_SPLITS * 4 * 16 * 32)
    assert torch.equal(visible_mla_gpu(*operands, 1 << 20), want)


@pytest.mark.parametrize(
    ("programs", "slots", "splits"),
    [(1, 2048, 32), (5, 2048, 16), (8, 2048, 16), (64, 2048, 2), (4096, 2048, 1), (1, 65, 2), (1, 0, 1)],
)
def test_splits(programs, slots, splits):
    assert splits_for(programs, slots) == splits


# --- at real widths -----------------------------------------------------------------------------------


def real_case(tokens: int, slots: int, fp8: bool, row_count: int = 5000, heads: int = HEADS) -> Case:
    random = torch.Generator("cuda").manual_seed(tokens * 10_000 + slots)
    query = torch.randn(tokens, heads, WIDTH, device="cuda", generator=random).bfloat16()
    rows = torch.randn(row_count, WIDTH, device="cuda", generator=random).bfloat16()
    selected = torch.rand(tokens, row_count, device="cuda", generator=random).argsort(1)[:, :slots]
    if tokens > 1:  # a tail of empty slots, and holes
        used = torch.randint(1, slots + 1, (tokens, 1), device="cuda", generator=random)
        used[0] = slots
        selected = selected.where(torch.arange(slots, device="cuda") < used, -1)
        selected[1, 1:40:3] = -1
        selected[-1, 1:130] = -1
    unnamed = torch.ones(row_count, dtype=torch.bool, device="cuda")
    unnamed[selected[selected >= 0]] = False
    if fp8:
        rows = encode_latent_rows(rows, VALUES)
    rows[unnamed] = 255 if fp8 else torch.nan
    return Case(query, rows, selected, VALUES, SCALE)


def requires_hopper() -> None:
    if not cuda.cuda.can_run(torch.device("cuda"), cuda.SOURCE):
        pytest.skip("no Hopper GPU, or no NVRTC")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
@pytest.mark.parametrize(
    ("tokens", "slots"),
    [
        (1, 1),
        (1, 63),
        (2, 64),
        (8, 65),
        (2, 200),
        (1, SLOTS),
        (2, SLOTS),
        (8, SLOTS),
        (33, SLOTS),
        (200, SLOTS),
    ],
)
def test_real_widths(tokens, slots, fp8):
    requires_hopper()
    case = real_case(tokens, slots, fp8)
    assert cuda.supports(case.query, case.rows, VALUES)
    for splits in (None, 1, 2, 7, 32):
        actual = sparse_mla_gpu(*case.operands, splits)
        assert_right(case, actual)
        again = sparse_mla_gpu(*case.operands, splits)
        assert torch.equal(actual[0], again[0])
        assert torch.equal(actual[1], again[1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
def test_real_widths_in_triton(fp8):
    case = real_case(9, SLOTS, fp8)
    assert_right(case, sparse_mla_triton(*case.operands))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
@pytest.mark.parametrize("splits", [1, 4])
def test_real_widths_company_changes_no_bit(splits, fp8):
    requires_hopper()
    case = real_case(40, SLOTS, fp8)
    together = sparse_mla_gpu(*case.operands, splits)
    for token in (0, 1, 17, 39):
        used = int((case.selected[token] >= 0).nonzero().max()) + 1
        own = case.selected[token : token + 1, :used]
        alone = sparse_mla_gpu(case.query[token : token + 1], case.rows, own, VALUES, SCALE, splits)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_of_them[token])


@pytest.mark.gpu
@needs_gpu
def test_two_groups_of_heads():
    requires_hopper()
    case = real_case(3, 300, fp8=True, heads=128)
    for splits in (1, 4):
        assert_right(case, sparse_mla_gpu(*case.operands, splits))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
def test_rows_past_2_to_the_31_bytes_and_elements(fp8):
    """The same rows once at the front and once at the far end of a large cache."""
    case = real_case(4, 500, fp8, row_count=3000)
    width = case.rows.shape[1]
    offset = (2**31 + 2**20) // width
    rows = torch.empty(offset + 3000, width, dtype=case.rows.dtype, device="cuda")
    rows[:3000] = 255 if fp8 else torch.nan
    rows[offset:] = case.rows
    selected = (case.selected + offset).where(case.selected >= 0, -1)
    near, far = (
        sparse_mla_gpu(case.query, *operands, VALUES, SCALE)
        for operands in ((case.rows, case.selected), (rows, selected))
    )
    assert torch.equal(near[0], far[0])
    assert torch.equal(near[1], far[1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [16, HEADS])
def test_visible_rows_have_the_bits_of_a_selection_of_them(heads):
    """In a batch of other lengths, and alone; in tiles of tokens or not."""
    random = torch.Generator("cuda").manual_seed(0)
    rows = encode_latent_rows(torch.randn(64 * 64, WIDTH, device="cuda", generator=random), VALUES)
    table = RowTable(torch.randperm(64, device="cuda", generator=random).view(2, 32) * 64, 64)
    query = torch.randn(5, heads, WIDTH, device="cuda", generator=random).bfloat16()
    sequence_ids = torch.tensor([0, 0, 1, 1, 0], device="cuda")
    visible = torch.tensor([2000, 64, 1, 700, 129], device="cuda")
    places = table, sequence_ids, visible
    together = visible_mla(query, rows, *places, VALUES, SCALE, 1 << 30)
    assert torch.equal(visible_mla(query, rows, *places, VALUES, SCALE, 1), together)
    for token, seen in enumerate(visible.tolist()):
        own = slice(token, token + 1)
        numbers = table.rows(sequence_ids[own], torch.arange(seen, device="cuda")[None])
        selected = sparse_mla(query[own], rows, numbers, VALUES, SCALE, invariant=True)
        assert torch.equal(selected[0], together[token])


@pytest.mark.gpu
@needs_gpu
def test_is_captured_in_a_graph():
    case = real_case(8, SLOTS, fp8=True)
    eager = sparse_mla(*case.operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse_mla(*case.operands)
    graph.replay()
    assert torch.equal(captured, eager)
