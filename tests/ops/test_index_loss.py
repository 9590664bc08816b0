"""The indexer's loss: the tiled version against the plain one, and against finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.ops.index_loss import index_loss, index_loss_reference
from tests.allocations import peak_bytes
from tests.ops.index_loss_cases import Case, gradients, make_case

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@st.composite
def cases(draw) -> Case:
    return make_case(
        queries=draw(st.integers(1, 9)),
        index_heads=draw(st.integers(1, 5)),
        index_width=draw(st.integers(1, 20)),
        heads=draw(st.integers(1, 5)),
        width=draw(st.integers(1, 30)),
        length=draw(st.integers(1, 60)),
        served=draw(st.integers(1, 3)),
        slots=draw(st.none() | st.integers(1, 40)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40)
@given(case=cases(), budget=st.sampled_from([1, 20_000, 1 << 28]))
def test_loss_and_gradients_are_those_of_the_plain_version(case, budget):
    for tensor in (case.query, case.weights, case.keys):
        tensor.requires_grad_()
    learnt = case.query, case.weights, case.keys
    actual, expected = index_loss(*case.operands, budget), index_loss_reference(*case.operands)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    if not expected.requires_grad:  # nobody sees anything
        return
    for ours, theirs in zip(gradients(actual, learnt), gradients(expected, learnt), strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0.0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("slots", [None, 9])
def test_gradients_pass_the_finite_difference_check(slots):
    case = make_case(queries=3, index_width=4, length=12, slots=slots).to(dtype=torch.float64)
    case.keys = case.keys.nan_to_num(0.5)
    learnt = [tensor.requires_grad_() for tensor in (case.query, case.weights, case.keys)]

    def loss(query, weights, keys):
        return index_loss(query, weights, keys, case.layers, case.scale, case.seen)

    assert torch.autograd.gradcheck(loss, learnt)


def test_it_is_zero_where_the_indexer_foresees_the_attention():
    """One head each, the scores above 0 and equal to the attention's but for a constant."""
    case = make_case(queries=4, index_heads=1, heads=1, served=1, index_width=24)
    case.seen = torch.tensor([1, 20, 50, 69])
    query, rows = case.layers[0]
    rows.nan_to_num_(0.0)
    case.keys = torch.cat((case.scale * rows, torch.ones(len(rows), 1)), 1)
    case.query = torch.cat((query, torch.full((4, 1, 1), 100.0)), 2)
    case.weights = torch.ones(4, 1)
    assert index_loss(*case.operands).item() == pytest.approx(0.0, abs=1e-3)
    case.weights[3] = 0.5
    assert index_loss(*case.operands) > 0.1


@pytest.mark.parametrize("slots", [None, 50])
def test_no_more_memory_than_the_budget(slots):
    budget = 1 << 20
    case = make_case(queries=300, length=200, slots=slots)
    learnt = [tensor.requires_grad_() for tensor in (case.query, case.weights, case.keys)]
    kept = 4 * sum(tensor.nbytes for tensor in learnt)
    assert peak_bytes(lambda: index_loss(*case.operands, budget).backward()) <= budget + kept
