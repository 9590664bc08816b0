"""Triton's kernels of the selection, small: where there is no GPU they are interpreted."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.index_topk_cases import Case, make

gpu = pytest.importorskip("megaspan.ops.index_topk.gpu", reason="no Triton here")
from megaspan.ops.index_topk import cuda, gpu_decode, gpu_prefill  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")
GIB = 1 << 30


@pytest.fixture(params=["few", "many"])
def way(request, monkeypatch) -> str:
    """Whether all sequences count as ones of few queries, whose scores are stored, or of many."""
    monkeypatch.setattr(gpu, "FEW_QUERIES", 64 if request.param == "few" else 0)
    return request.param


@pytest.fixture
def select(kernel_device, monkeypatch) -> Callable[..., Tensor]:
    """Select by Triton's kernels, to the CPU. Interpreted, as many programs as a GPU has would take long."""
    if kernel_device == "cpu":
        monkeypatch.setattr(gpu_decode, "PROGRAMS", 5)
    monkeypatch.setattr(cuda, "supports", lambda *operands: False)

    def select(case: Case, budget: int = GIB, **known) -> Tensor:
        return gpu.index_topk_gpu(*case.to(kernel_device).arguments(), budget, **known).cpu()

    return select


def small(visible: list[list[int]], page_size: int = 64, fp8: bool = False) -> Case:
    """A case of whole numbers, so with ties, whose 64 rows that no page holds are NaN."""
    case = make(visible, heads=4, width=32, topk=8, page_size=page_size, dtype=torch.bfloat16)
    if fp8:
        case = case.in_fp8()
        nothing = torch.full((case.table.page_size, 36), 255, dtype=torch.uint8)
    else:
        nothing = torch.full((64, 32), torch.nan, dtype=torch.bfloat16)
    return replace(case, keys=torch.cat((case.keys, nothing)))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [0, 4, 64])
def test_equals_the_reference(select, way, page_size, fp8):
    case = small([[5, 40, 150, 151], [130], [8, 9, 64, 65, 128, 1]], page_size, fp8)
    assert select(case).equal(case.reference())


def test_few_and_many_in_one_call(select, monkeypatch):
    monkeypatch.setattr(gpu, "FEW_QUERIES", 2)
    case = small([[70], list(range(124, 131)), [65, 66]])
    expected = case.reference()
    assert select(case).equal(expected)
    assert select(case, query_lengths=(1, 7, 2), longest=130).equal(expected)
    assert select(case.at(slice(0, 0))).shape == (0, 8)
    interleaved = torch.tensor([8, 0, 3, 9, 1, 2, 7])
    assert select(case.at(interleaved)).equal(expected[interleaved])


def test_a_sequence_without_tokens_beside_one_of_many(select):
    case = small([list(range(60, 130))])
    assert select(case, query_lengths=(0, 70), longest=129).equal(case.reference())


def test_lengths_may_lie_apart_in_memory(select):
    case = small([[5, 40, 150, 151]])
    apart = torch.stack((case.visible, case.visible + 7), 1)[:, 0]
    assert select(replace(case, visible=apart)).equal(case.reference())


def test_many_queries_stay_within_the_budget(select, way):
    if way == "few":
        pytest.skip("of many queries")
    case = small([list(range(60, 78))])
    with pytest.raises(ValueError, match="needs a budget of at least"):
        select(case, 100_000)
    assert select(case, 2 * gpu_prefill.group_bytes(8)).equal(case.reference())


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_equals_go_to_the_lowest_position(select, way, fp8):
    case = make([[200, 70]], heads=4, width=32, page_size=64, dtype=torch.bfloat16)
    case.keys[:] = 1
    case = case.in_fp8() if fp8 else case
    assert select(case).tolist() == [list(range(8))] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_are_not_finite(select, way, value, sign):
    """NaN counts as -inf, which weights below zero make of infinity."""
    case = small([[150, 5, 9, 100]])
    case = replace(case, query=case.query.abs() + 1, weights=sign * (case.weights.abs() + 1))
    for some in (slice(None, None, 3), slice(None)):
        case.keys[some] = value
        assert select(case).equal(case.reference())


def test_fp8_keys_that_are_nan(select, way):
    case = make([[150, 5, 9, 100]], heads=4, width=32, page_size=64, dtype=torch.bfloat16)
    case.keys[::3, 31] = torch.nan
    case = case.in_fp8()
    assert select(case).equal(case.reference())


def test_groups_that_do_not_fit_the_budget_take_turns(select):
    case = small([[100], [150], [64, 65, 66, 67, 68]])
    with pytest.raises(ValueError, match="a budget of at least") as refusal:
        select(case, budget=1)
    least = next(int(word) for word in str(refusal.value).split() if word.isdigit())
    for budget in (least, 2 * least + 1):
        assert select(case, budget).equal(case.reference())
    with pytest.raises(ValueError, match="a budget of at least"):
        select(case, least - 1)


def test_queries_whose_lists_overflow_are_done_anew(select, monkeypatch):
    """All 40 tiles are in the first phase, which keeps everything, and a tile's row has a list of 32."""
    monkeypatch.setattr(gpu, "FEW_QUERIES", 0)
    monkeypatch.setattr(gpu_prefill, "MAX_SPLITS", 1)
    monkeypatch.setattr(gpu_prefill, "LIST_LENGTH", 32)
    anew, decode = [], gpu_decode.index_topk_decode

    def counted(query: Tensor, *others) -> None:
        anew.append(len(query))
        decode(query, *others)

    monkeypatch.setattr(gpu_decode, "index_topk_decode", counted)
    case = small([[2560, 900, 2500, 7]])
    assert select(case).equal(case.reference())
    assert anew == [2]


def test_several_phases(select, monkeypatch):
    monkeypatch.setattr(gpu, "FEW_QUERIES", 0)
    monkeypatch.setattr(gpu_prefill, "SAMPLE_TILES", 2)
    case = small([[64 * tiles + 1 for tiles in (1, 2, 3, 7, 8)]])
    assert select(case).equal(case.reference())


def test_maxima_that_are_stored(select, monkeypatch):
    """Of 16 keys, past 4 times as many keys as maxima; past 16 times of 64."""
    monkeypatch.setattr(gpu_decode, "LEAST_MAXIMA", 32)
    case = small([[128, 129, 300, 700], [512], [513, 514]])
    assert select(case).equal(case.reference())


def test_candidates_that_do_not_fit_their_list(select):
    """As many as are equal, and better ones at the end."""
    case = make([[16640]], heads=4, width=32, page_size=64, dtype=torch.bfloat16)
    case.keys[:] = 1
    case = replace(case, query=case.query.abs() + 1, weights=case.weights.abs() + 1)
    case.keys[case.table.rows(case.sequence_ids, torch.tensor([[16639, 16000]]))] = 2
    assert select(case).tolist() == [[0, 1, 2, 3, 4, 5, 16000, 16639]]
