"""Where index_topk's rows lie, how much memory it takes, and that neither changes what it selects."""

from dataclasses import replace

import pytest
import torch

from megaspan.ops import native
from megaspan.ops.index_topk.blocked import tile_shape
from megaspan.ops.index_topk.native import SOURCE, Problem, plan
from megaspan.ops.quant import store_index_rows
from megaspan.ops.rows import RowTable
from tests.allocations import peak_bytes
from tests.ops.index_topk_cases import MIB, make

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_does_not_depend_on_threads_company_or_budget(select, fp8):
    """The same choice alone or in a batch, split among threads or not, in large steps or small."""
    case = make([[9000] * 40], heads=5, width=24, topk=33, whole=False)
    case = case.in_fp8() if fp8 else case
    one = case.at(slice(0, 1))
    expected = select(case)
    assert torch.equal(select(one)[0], expected[0])
    assert torch.equal(select(case, MIB // 4), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(select(case), expected)
            assert torch.equal(select(one)[0], expected[0])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_physical_pages_do_not_matter(select, fp8):
    """P20: the same sequence under another order of pages gives the same positions."""
    contiguous = make([[83, 90, 90]], whole=False)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3))
    table = RowTable(order[None] * 4, 4)
    places = table.rows(torch.tensor([0]), torch.arange(90)[None])[0]
    if fp8:
        keys = torch.full((92, contiguous.keys.shape[1] + 4), 255, dtype=torch.uint8)
        store_index_rows(contiguous.keys[:90], keys, places, 4, rotate=False)
        contiguous = contiguous.in_fp8()
    else:
        keys = torch.full_like(contiguous.keys, torch.nan).index_copy(0, places, contiguous.keys[:90])
    assert torch.equal(select(replace(contiguous, keys=keys, table=table)), select(contiguous))


def sparse(nbytes: int) -> torch.UntypedStorage:
    """Memory of which only the pages that are touched will exist."""
    try:
        return torch.UntypedStorage(nbytes)
    except RuntimeError:
        pytest.skip("no address space for a sparse 5 GB")


def test_rows_beyond_two_to_the_31_elements(select):
    """P18: a view whose rows lie so far apart that a 32-bit offset would wrap to another row."""
    near = make([[60] * 2], width=8, dtype=torch.bfloat16)
    stride = (1 << 31) // 50
    far = sparse(60 * stride * near.keys.itemsize)
    keys = torch.empty(0, dtype=near.keys.dtype).set_(far, 0, near.keys.shape, (stride, 1))
    keys.copy_(near.keys)
    assert torch.equal(select(replace(near, keys=keys)), near.reference())


def test_fp8_pages_beyond_two_to_the_31_bytes(select):
    """P18: pages of a storage so long that a 32-bit offset would wrap to another page."""
    case, apart = make([[60] * 2], width=28, page_size=4), (1 << 31) // 32 // 50 * 4
    pages = apart * torch.arange(15).flip(0)
    rows = apart * 14 + 4
    keys = torch.empty(0, dtype=torch.uint8).set_(sparse(rows * 32), 0, (rows, 32), (32, 1))
    table = RowTable(pages[None], 4)
    places = table.rows(torch.tensor([0]), torch.arange(60)[None])[0]
    store_index_rows(
        case.keys[case.table.rows(torch.tensor([0]), torch.arange(60)[None])[0]], keys, places, 4, False
    )
    assert places.max() * 32 > 1 << 31
    case = case.in_fp8()
    assert torch.equal(select(replace(case, keys=keys, table=table)), case.reference())


def test_a_table_of_many_long_sequences_is_not_copied(select):
    """An engine's table of 64 sequences and 1 Mi positions, 8 MiB, serves one token of the last of them."""
    case = make([[200]], page_size=64)
    starts = torch.full((64, 16384), -12345)
    starts[63, : case.table.starts.shape[1]] = case.table.starts[0]
    wide = replace(case, table=RowTable(starts, 64), sequence_ids=torch.tensor([63]))
    answer = []
    assert peak_bytes(lambda: answer.append(select(wide, MIB))) <= MIB
    assert torch.equal(answer[0], case.reference())


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("length", [1024, 16384])
@pytest.mark.parametrize("heads", [1, 32])
def test_memory_stays_within_the_budget(select, length, heads, fp8):
    """P21, P23: neither length nor heads take the peak past the budget, and the result is the same.

    The scores of all 64 tokens at the greater length would be 4 MiB, four times the budget.
    """
    case = make([[length] * 64], heads=heads, width=16)
    case = case.in_fp8() if fp8 else case
    answer = []
    most = peak_bytes(lambda: answer.append(select(case, MIB)))
    assert 0 < most <= MIB
    assert torch.equal(answer[0], select(case, 16 * MIB))


def test_budget_is_read_at_every_call():
    """P22: the steps follow the budget of the call."""
    assert tile_shape(65536, 32, 64, 64, 64 * MIB, True)[0] > tile_shape(65536, 32, 64, 64, 4 * MIB, True)[0]
    library = native.load(SOURCE)
    if library is None:
        pytest.skip("no compiler here")
    tiles = []
    for budget in (64 * MIB, MIB // 4, 64 * MIB):
        problem = Problem(tokens=512, heads=32, width=64, topk=64, is_bf16=0)
        assert plan(library, problem, 65536, budget) <= budget
        tiles.append((problem.tile, problem.groups))
    assert tiles[0] == tiles[2] > tiles[1]


def test_budget_below_the_smallest_step_is_refused(select):
    with pytest.raises(ValueError, match="budget of"):
        select(make([[5000]], topk=64), 1000)
