"""What bf16 does to a training step, where it selects what float32 does."""

import pytest

from tests.train.selections import recorded_selections, replayed_selections
from tests.train.small_run import STAGES, WriteRecipe, trainer_of


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_in_bf16_is_that_in_float32(recipe: WriteRecipe, stage: str) -> None:
    """Softmax and sums are in float32; the states that they are given are rounded, to 2^-9 relative each."""
    exact, rounded = (trainer_of(recipe(STAGES[stage], dtype=dtype)) for dtype in ("float32", "bfloat16"))
    with recorded_selections() as positions:
        expected = exact.train_step()
    with replayed_selections(positions) as flipped:
        actual = rounded.train_step()
    for name in expected.keys() - {"busiest_expert"}:
        assert float(actual[name]) == pytest.approx(float(expected[name]), rel=2**-7), name
    assert all(share < 0.1 for share in flipped)  # by itself it would have chosen nearly the same
