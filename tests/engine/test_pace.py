"""The cost of a step is learned, and chunks shrink as the context grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.engine.pace import StepCost

BASE, TOKEN, PAIR = 2e-3, 1e-4, 2e-8  # seconds


def seconds(tokens: int, context: float) -> float:
    return BASE + TOKEN * tokens + PAIR * tokens * (context + tokens / 2)


def learned(contexts, chunk: int = 256, decoding: float = 0.0) -> StepCost:
    """Costs fitted to synthetic steps."""
    cost = StepCost()
    if decoding:
        cost.measured_decode(decoding)
    for context in contexts:
        for tokens in (chunk, chunk // 4):
            pairs = tokens * (context + tokens / 2)
            cost.measured_chunks(tokens, pairs, seconds(tokens, context) + decoding, decoding > 0)
    return cost


@pytest.fixture(scope="module")
def cost():
    return learned([1000 * number for number in range(40)])


def test_costs_are_found_again(cost):
    for context in (0, 10_000, 30_000):
        assert cost.base_seconds + cost.seconds(200, context) == pytest.approx(seconds(200, context), rel=0.1)


@pytest.mark.parametrize("context", [0, 5_000, 50_000, 500_000, 1_000_000])
def test_a_chunk_keeps_to_its_time_at_every_context(cost, context):
    """P60: also at contexts far beyond those that were measured."""
    tokens = cost.tokens_within(0.25, context)
    assert tokens >= 1
    assert seconds(tokens, context) - BASE == pytest.approx(0.25, rel=0.25)


def test_chunks_shrink_with_the_context(cost):
    """P60: a token at 500K costs more than a hundred times one at 5K's share of it."""
    sizes = [cost.tokens_within(0.25, context) for context in (0, 5_000, 50_000, 500_000, 1_000_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < sizes[1] / 10


def test_what_decodes_beside_a_chunk_is_not_charged_to_it():
    alone, beside = learned(range(0, 40_000, 2000)), learned(range(0, 40_000, 2000), decoding=0.05)
    assert beside.seconds(256, 10_000) == pytest.approx(alone.seconds(256, 10_000), rel=0.02)
    assert beside.decode_seconds == pytest.approx(0.05)


def test_a_machine_that_becomes_slower_is_noticed(cost):
    cost = learned([5000] * 20)
    before = cost.tokens_within(0.25, 5000)
    for _ in range(60):
        cost.measured_chunks(256, 256 * 5128, 10 * seconds(256, 5000), False)
    assert cost.tokens_within(0.25, 5000) < before / 4


def test_one_outlier_does_not_stop_the_engine():
    """A step that took a minute, as a first one with compilation may, is forgiven."""
    cost = StepCost()
    cost.measured_chunks(64, 64 * 32, 60.0, False)
    for _ in range(100):
        cost.measured_chunks(64, 64 * 5032, seconds(64, 5000), False)
    assert cost.tokens_within(0.25, 5000) > 500


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(0, 10**6), st.floats(0, 1e3), st.booleans()),
        max_size=30,
    ),
    st.floats(1e-3, 10),
    st.integers(0, 10**6),
)
def test_any_measurements_leave_sane_costs(steps, budget, context):
    """Never a negative cost, and what is said to fit does fit, by the same costs."""
    cost = StepCost()
    for tokens, past, took, decoding in steps:
        cost.measured_decode(took / 2)
        cost.measured_chunks(tokens, tokens * (past + tokens / 2), took, decoding)
    assert cost.base_seconds >= 0
    tokens = cost.tokens_within(budget, context)
    assert tokens >= 0
    assert cost.seconds(tokens, context) <= budget * (1 + 1e-6)
    assert cost.seconds(tokens + 2, context) >= budget * (1 - 1e-6)
    assert cost.tokens_within(0.0, context) == cost.tokens_within(-1.0, context) == 0
