"""Which of equal or close scores index_topk selects. P numbers are faults other engines had."""

from dataclasses import replace

import pytest
import torch

from megaspan.ops.quant import index_row_views
from tests.ops.index_topk_cases import MIB, in_fp8_pages, make

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_all_scores_zero_picks_the_first(select, weight, fp8):
    """P14: every ReLU is shut; with negative weights the zeros are -0.0."""
    case = make([[5000, 700]], topk=64)
    weights = torch.full_like(case.weights, weight)
    case = replace(case, query=case.query.abs(), keys=-case.keys.abs(), weights=weights)
    case = case.in_fp8() if fp8 else case
    assert (select(case) == torch.arange(64, dtype=torch.int32)).all()


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_few_positives_and_a_plateau_of_zeros(select, fp8):
    """P14: 1 % of the keys score above the plateau, its lowest positions fill the rest; 20 runs agree."""
    case = make([[6000]], topk=96)
    keys = -case.keys.abs()
    keys[torch.randperm(6000, generator=torch.Generator().manual_seed(1))[:60]] *= -1
    case = replace(case, query=case.query.abs(), keys=keys, weights=case.weights.abs())
    case = case.in_fp8() if fp8 else case
    runs = [select(case) for _ in range(20)]
    assert torch.equal(runs[0], case.reference())
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_fp8_keys_tie_across_scales(select):
    """P14: keys that score the same through another scale and value are told apart by position only."""
    width, length = 8, 2000
    keys = torch.zeros(length, width)
    keys[:, 0] = 2.0
    keys[torch.arange(length), 1 + torch.arange(length) % 7] = 2.0 ** (torch.arange(length) % 9)
    query = torch.zeros(1, 2, width)
    query[..., 0] = 1.0
    case = replace(make([[length]], heads=2, topk=40), query=query, keys=keys, weights=torch.ones(1, 2))
    case = case.in_fp8()
    assert len(index_row_views(case.keys, length)[1].unique()) > 1
    assert select(case).tolist() == [list(range(40))]


@pytest.mark.parametrize("flush", [False, True], ids=["", "flushing subnormals"])
def test_every_e4m3_value_in_order(select, flush):
    """Keys of the values 0 to 448, of which the least are subnormal, whatever the process does with those."""
    for topk in (1, 60, *range(119, 127)):
        order = torch.randperm(127, generator=torch.Generator().manual_seed(topk))
        keys = in_fp8_pages(torch.full((127, 8), 448.0), 128)
        index_row_views(keys, 128)[0].view(torch.uint8)[0, :127] = order[:, None]
        case = make([[127]], heads=1, topk=topk)
        query, weights = torch.ones_like(case.query).bfloat16(), torch.ones_like(case.weights)
        case = replace(case, query=query, keys=keys, weights=weights)
        torch.set_flush_denormal(flush)
        try:
            selected = select(case)
        finally:
            torch.set_flush_denormal(False)
        assert sorted(order[selected[0].long()].tolist()) == list(range(127 - topk, 127))


def test_needle_early_in_a_long_row(select):
    """P16: the one good key, at position 5 of 131,073, is chosen by every token."""
    case = make([[131_073] * 3], heads=4, width=16, whole=False)
    case = replace(case, query=case.query.abs(), keys=case.keys * 0.01, weights=case.weights.abs() + 1)
    case.keys[5] = 1.0
    assert (select(case, 16 * MIB) == 5).any(1).all()


def test_close_scores_are_told_apart(select):
    """P05: two keys about rank topk differ by 1e-4 relative, which bf16 weights or sums would not see."""
    case = make([[100]], heads=2, width=8, topk=4, whole=False)
    keys = torch.zeros_like(case.keys)
    keys[[10, 20, 30], 0] = 5.0
    keys[40, 0], keys[50, 1] = 1.0, 1.0
    query = torch.zeros_like(case.query)
    query[0, 0, 0], query[0, 1, 1] = 1.0, 1.0
    for better, weights in ((40, [1.0001, 1.0]), (50, [1.0, 1.0001])):
        close = replace(case, query=query, keys=keys, weights=torch.tensor([weights]))
        assert select(close).tolist() == [[10, 20, 30, better]]
