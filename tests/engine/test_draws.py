import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megaspan.engine.draws import draw, draw_ranked, fixed_weights, uniforms

few_weights = st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any)
shares = st.floats(0, 1, exclude_max=True)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def weights_of(values: list[int]) -> torch.Tensor:
    """Weights [1, V] in the given proportions, 2**40 the greatest."""
    return torch.tensor([[value * (1 << 40) // max(values) for value in values]])


def test_uniforms_are_even_and_differ_between_seeds_and_steps():
    seeds, steps = np.divmod(np.arange(40_000), 200)
    values = uniforms(seeds.astype(np.uint64), steps)
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == 40_000
    cells = np.histogram2d(values[:-1], values[1:], bins=10, range=[[0, 1], [0, 1]])[0]
    assert (np.abs(cells - 400) < 5 * 20).all()  # neighbours are independent: 5 standard deviations
    by_seed = values.reshape(200, 200)
    cells = np.histogram2d(by_seed[:-1].ravel(), by_seed[1:].ravel(), bins=10, range=[[0, 1], [0, 1]])[0]
    assert (np.abs(cells - 398) < 5 * 20).all()


def test_a_uniform_depends_on_its_seed_and_step_alone():
    seeds = np.array([0, 1, (1 << 64) - 1, 12345], dtype=np.uint64)
    steps = np.array([0, 1 << 20, 3, 7])
    together = uniforms(seeds, steps)
    alone = [uniforms(seeds[index : index + 1], steps[index : index + 1])[0] for index in range(4)]
    assert together.tolist() == alone


def test_weights_are_whole_parts_of_the_best():
    weights = fixed_weights(torch.tensor([[0.0, -1.0, -100.0, -torch.inf]], dtype=torch.float64))
    assert weights.tolist() == [[1 << 40, int(np.exp(-1.0) * 2**40), 0, 0]]


@given(few_weights, shares)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(values, uniform):
    weights = weights_of(values)
    token = int(draw(weights, one(0), one(uniform)))
    assert weights[0, token] > 0
    total = int(weights.sum())
    assert int(weights[0, :token].sum()) <= uniform * total < int(weights[0, : token + 1].sum()) + 1


@given(few_weights, st.integers(1, 12), st.floats(0.01, 1), st.floats(0, 1), shares, st.integers(1, 12))
@example([1, 1, 1, 1, 2], 4, 0.5625, 0.0, 0.5, 3)
def test_the_number_of_candidates_changes_nothing(values, top_k, top_p, min_p, uniform, candidates):
    weights = weights_of(values)
    arguments = torch.tensor([min(top_k, len(values))]), one(top_p), one(min_p), one(uniform)
    narrow = draw_ranked(weights, *arguments, candidates)
    assert torch.equal(narrow, draw_ranked(weights, *arguments, len(values)))


def test_the_lowest_ids_are_the_best_among_equals():
    weights = torch.full((1, 9), 1 << 40)
    drawn = {
        int(draw_ranked(weights, torch.tensor([3]), one(1), one(0), one(uniform)))
        for uniform in np.linspace(0, 0.999, 50)
    }
    assert drawn == {0, 1, 2}


def test_the_greatest_uniform_draws_the_last_token_that_counts():
    weights = weights_of([1, 1, 0])
    assert int(draw(weights, one(0), one(1 - 2.0**-53))) == 1
    wide = torch.full((1, 1 << 20), 1 << 40)  # a total that float64 rounds
    assert int(draw(wide, one(0), one(1 - 2.0**-53))) == (1 << 20) - 1
