"""Exact, deterministic selection by every version of index_topk. P numbers are faults other engines had."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops import native
from megaspan.ops.index_topk import index_topk, index_topk_blocked
from megaspan.ops.index_topk.native import SOURCE
from megaspan.ops.quant import decode_index_rows
from megaspan.ops.rows import RowTable
from tests.ops.index_topk_cases import MIB, Case, make

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def scores_of(case: Case, token: int) -> Tensor:
    """The scores of what a token sees, in fp64."""
    positions = torch.arange(int(case.visible[token]))
    rows = case.table.rows(case.sequence_ids[token, None], positions[None])[0]
    is_fp8 = case.keys.dtype == torch.uint8
    keys = decode_index_rows(case.keys, rows, case.table.page_size) if is_fp8 else case.keys[rows]
    products = case.query[token].double() @ keys.double().T
    return case.weights[token].double() @ products.relu()


@st.composite
def cases(draw, whole: bool) -> Case:
    visible = draw(st.lists(st.lists(st.integers(0, 260), min_size=1, max_size=6), min_size=1, max_size=4))
    return make(
        visible,
        heads=draw(st.integers(1, 33)),
        width=draw(st.integers(8, 80)),
        topk=draw(st.sampled_from([1, 7, 8, 64])),
        page_size=draw(st.sampled_from([0, 4, 64])),
        whole=whole,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=25)
@given(case=cases(whole=True))
def test_equals_reference_where_sums_are_exact(select, case):
    assert torch.equal(select(case), case.reference())


@settings(max_examples=20)
@given(case=cases(whole=True))
def test_fp8_keys_equal_reference_where_sums_are_exact(select, case):
    exact, packed = case.reference(), case.in_fp8()
    assert torch.equal(packed.reference(), exact)
    assert torch.equal(select(packed), exact)


@settings(max_examples=15)
@given(case=cases(whole=False), fp8=st.booleans())
def test_picks_the_best_up_to_rounding(select, case, fp8):
    case = case.in_fp8(rotate=True) if fp8 else case
    for token, selected in enumerate(select(case)):
        scores = scores_of(case, token)
        wanted = min(case.topk, len(scores))
        positions = selected[:wanted].long()
        assert (selected[wanted:] == -1).all()
        assert (positions.diff() > 0).all()
        worst = scores.sort(descending=True).values[:wanted]
        torch.testing.assert_close(
            scores[positions].sort(descending=True).values, worst, rtol=1e-5, atol=1e-5 * case.query.shape[2]
        )


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 47, 48, 49, 3000], ids=lambda n: f"L{n}")
def test_lengths_about_topk_and_the_block(select, length):
    case = make([[length, max(0, length - 1), length // 2]], page_size=4)
    assert torch.equal(select(case), case.reference())


def test_fewer_visible_than_topk_leaves_minus_one(select):
    """P12: masked keys are never chosen and no slot keeps what the buffer held before."""
    assert select(make([[3]])).tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]


def test_prompts_about_topk_in_one_batch(select):
    """P10: topk - 1, topk and topk + 1 visible positions, alone and mixed."""
    lengths = [7, 8, 9]
    mixed = make([[n] for n in lengths])
    assert torch.equal(select(mixed), mixed.reference())
    for token in range(3):
        alone = mixed.at(slice(token, token + 1))
        assert torch.equal(select(alone)[0], select(mixed)[token])


def test_not_finite_fp8_keys(select):
    """A NaN among the values counts as -inf, wherever it stands and whatever the width."""
    for width in (4, 33):
        case = make([[300, 5, 9]], heads=2, width=width, topk=8)
        case = replace(case, query=case.query.abs() + 1, weights=case.weights.abs() + 1)
        case.keys[::3, width - 1] = torch.nan
        case = case.in_fp8()
        assert torch.equal(select(case), case.reference())
        assert not (select(case)[0] % 3 == 0).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_keys(select, value):
    """NaN counts as -inf; nothing hangs; infinities order as numbers."""
    case = make([[300, 5, 9]], heads=2, width=4, topk=8)
    case = replace(case, query=case.query.abs() + 1, weights=case.weights.abs() + 1)
    case.keys[::3] = value
    assert torch.equal(select(case), case.reference())
    case.keys[:] = value
    assert torch.equal(select(case), case.reference())


def test_token_without_sequence_order(select):
    """Tokens of the sequences may come interleaved."""
    case = make([[50, 51, 52], [40, 41, 42]], page_size=4)
    shuffled = torch.tensor([3, 0, 4, 1, 5, 2])
    assert torch.equal(select(case.at(shuffled)), case.reference()[shuffled])


def test_no_tokens(select):
    assert select(make([[9]]).at(slice(0, 0))).shape == (0, 8)


def test_dispatcher_refuses_what_disagrees():
    case = make([[20]])
    for wrong, words in (
        ({"keys": case.keys.bfloat16()}, "bfloat16"),
        ({"keys": case.keys[:, :4]}, "disagree"),
        ({"weights": case.weights[:, :2]}, "weights"),
        ({"visible": case.visible.repeat(2)}, "visible"),
        ({"keys": case.in_fp8().keys}, "uint8"),
        ({"keys": case.in_fp8().keys[:, 1:]}, "disagree"),
    ):
        with pytest.raises(ValueError, match=words):
            index_topk(*replace(case, **wrong).arguments())


def test_fp8_keys_that_are_no_whole_pages_are_refused():
    case = make([[20]], width=6, page_size=2).in_fp8()
    strided = torch.empty(20, 24, dtype=torch.uint8)[:, :10]
    for wrong, words in (
        ({"keys": case.keys[1:]}, "whole pages of 2"),
        ({"keys": strided}, "contiguous"),
        ({"table": RowTable(case.table.starts, 1)}, "a multiple of 4, not 1 x 6: choose another page size"),
    ):
        with pytest.raises(ValueError, match=words):
            index_topk(*replace(case, **wrong).arguments())


@pytest.mark.skipif(native.load(SOURCE) is None, reason="no compiler here")
def test_fp8_keys_of_a_page_that_begins_within_another_are_refused():
    case = make([[20]], page_size=4).in_fp8()
    for page in range(5):
        starts = case.table.starts.clone()
        starts[0, page] += 2 if starts[0, page] < 8 else -2
        with pytest.raises(IndexError):
            index_topk(*replace(case, table=RowTable(starts, 4)).arguments())


def test_rows_out_of_range_are_refused(select):
    case = make([[20]])
    for wrong in (
        {"visible": torch.tensor([21])},
        {"sequence_ids": torch.tensor([1])},
        {"table": RowTable(torch.tensor([[1]]), 20)},
    ):
        with pytest.raises(IndexError):
            select(replace(case, **wrong))


def test_dispatcher_takes_any_layout():
    """Strided keys, non-contiguous queries, tensors that need a gradient, and half precision."""
    case = make([[40, 41]], width=8)
    wide = torch.zeros(len(case.keys), 20)
    wide[:, 3:11] = case.keys
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    strided = replace(case, keys=wide[:, 3:11], query=query)
    assert torch.equal(index_topk(*strided.arguments()), case.reference())
    columns = replace(case, keys=case.keys.T.contiguous().T)
    assert torch.equal(index_topk(*columns.arguments()), case.reference())
    half = replace(case, keys=case.keys.half(), query=case.query.half())
    assert torch.equal(index_topk(*half.arguments()), case.reference())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocked_on_a_gpu(dtype, fp8):
    case = make([list(range(1, 600))], heads=16, width=32, topk=64, page_size=64, dtype=dtype)
    case = case.in_fp8() if fp8 else case
    table = RowTable(case.table.starts.cuda(), case.table.page_size)
    moved = [value.cuda() if isinstance(value, Tensor) else value for value in case.arguments()]
    moved[3] = table
    assert torch.equal(index_topk_blocked(*moved, MIB).cpu(), case.reference())
