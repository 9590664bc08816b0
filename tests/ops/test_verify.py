"""Rejection sampling: the output has the target's distribution, exactly, whatever the drafts."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.verify import match_samples, verify

TRIALS = 20_000


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def chains(p: Tensor, q: Tensor, tokens: Tensor, seed: int, one_hot: bool = False) -> list[list[int]]:
    """What comes out of TRIALS sequences that all have the target rows p [γ + 1, V] and drafts from q [γ, V].

    tokens: [TRIALS, γ] drafts.
    """
    trials, drafts = tokens.shape
    generator = torch.Generator().manual_seed(seed)
    accepted, following = verify(
        p.repeat(trials, 1),
        None if one_hot else q.repeat(trials, 1),
        tokens.flatten(),
        starts_of([drafts] * trials),
        torch.rand(trials * drafts, generator=generator, dtype=torch.float64),
        torch.rand(trials * (drafts + 1), generator=generator, dtype=torch.float64),
    )
    kept = zip(tokens.tolist(), accepted.tolist(), following.tolist(), strict=True)
    return [[*drafted[:count], token] for drafted, count, token in kept]


def chi_square_is_small(counts: Tensor, probabilities: Tensor) -> bool:
    """Pearson's statistic within five standard deviations of its mean; what cannot come has not come."""
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible].double() * counts.sum()
    freedom = int(possible.sum()) - 1
    return float(((counts[possible] - expected) ** 2 / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5


P = torch.tensor([[0.05, 0.0, 0.45, 0.2, 0.3], [0.3, 0.1, 0.25, 0.35, 0.0], [0.0, 0.5, 0.1, 0.1, 0.3]])
Q = torch.tensor([[0.3, 0.1, 0.2, 0.4, 0.0], [0.05, 0.35, 0.3, 0.2, 0.1]])


@pytest.mark.parametrize("one_hot", [False, True])
def test_two_tokens_have_the_joint_distribution_of_the_target(one_hot):
    """Here p's second row does not depend on the first token, so the joint one is a product.

    The first token is the draft or its replacement; the second is drawn only where the first was accepted,
    and its distribution must be p's even so.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.stack([torch.multinomial(row, TRIALS, True, generator=generator) for row in Q], 1)
    out = chains(P, Q, tokens, seed=2, one_hot=one_hot)
    first = torch.tensor([chain[0] for chain in out]).bincount(minlength=5)
    assert chi_square_is_small(first, P[0])
    joint, joint_of_third = torch.zeros(5, 5), torch.zeros(5, 5)
    for chain in out:
        if len(chain) > 1:
            joint[chain[0], chain[1]] += 1
        if len(chain) > 2:
            joint_of_third[chain[1], chain[2]] += 1
    accepted_first = P[0].minimum(Q[0]) if not one_hot else P[0] * Q[0]
    accepted_second = P[1].minimum(Q[1]) if not one_hot else P[1] * Q[1]
    assert joint.sum() / TRIALS == pytest.approx(float(accepted_first.sum()), abs=0.015)
    for counts, accepted, row in ((joint, accepted_first, P[1]), (joint_of_third, accepted_second, P[2])):
        shares = (accepted / accepted.sum())[:, None] * row
        assert chi_square_is_small(counts.flatten(), shares.flatten())


def test_bursts_that_follow_each_other_give_the_exact_joint_distribution():
    """The second token depends on the first; a later burst uses the numbers of its positions again."""
    generator = torch.Generator().manual_seed(3)
    first, second = P[0], P[[2, 0, 1, 0, 2]]  # p(second | first)
    draft_first, draft_second = Q[0], Q[[1, 0, 1, 0, 0]]
    accept = torch.rand(TRIALS, 2, generator=generator, dtype=torch.float64)
    draw = torch.rand(TRIALS, 3, generator=generator, dtype=torch.float64)
    drafted = torch.multinomial(draft_first, TRIALS, True, generator=generator)
    drafts = torch.stack([drafted, torch.multinomial(draft_second[drafted], 1, generator=generator)[:, 0]], 1)
    third = P[1].expand(TRIALS, 5)
    p = torch.stack([first.expand(TRIALS, 5), second[drafted], third], 1).flatten(0, 1)
    q = torch.stack([draft_first.expand(TRIALS, 5), draft_second[drafted]], 1).flatten(0, 1)
    accepted, following = verify(
        p, q, drafts.flatten(), starts_of([2] * TRIALS), accept.flatten(), draw.flatten()
    )
    tokens = torch.where(torch.arange(2) < accepted[:, None], drafts, -1)
    tokens = torch.where(torch.arange(2) == accepted[:, None], following[:, None], tokens)
    short = tokens[:, 1] < 0  # the first draft was rejected: a second burst, of one draft
    again = tokens[short, 0]
    drafts = torch.multinomial(draft_second[again], 1, generator=generator)[:, 0]
    p = torch.stack([second[again], third[short]], 1).flatten(0, 1)
    accepted, following = verify(
        p,
        draft_second[again],
        drafts,
        starts_of([1] * len(again)),
        accept[short, 1],
        draw[short, 1:].flatten(),
    )
    tokens[short, 1] = torch.where(accepted == 1, drafts, following)
    counts = (tokens[:, 0] * 5 + tokens[:, 1]).bincount(minlength=25)
    assert chi_square_is_small(counts, (first[:, None] * second).flatten())


@st.composite
def batches(draw):
    """Arguments of `verify`: ragged drafts, none too, with exact zeros in p and q, and drafts of -1."""
    counts = draw(st.lists(st.integers(0, 4), max_size=5))
    vocabulary, drafts, rows = draw(st.integers(1, 40)), sum(counts), sum(counts) + len(counts)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))

    def distributions(number: int) -> Tensor:
        weights = torch.rand(number, vocabulary, generator=generator) ** 4
        weights[torch.rand(weights.shape, generator=generator) < 0.4] = 0
        weights[:, draw(st.integers(0, vocabulary - 1))] += 1e-3
        return weights / weights.sum(1, keepdim=True)

    p, q = distributions(rows), distributions(drafts)
    tokens = torch.multinomial(q, 1, generator=generator)[:, 0] if drafts else torch.zeros(0).long()
    tokens[torch.rand(drafts, generator=generator) < 0.1] = -1
    uniforms = [torch.rand(number, generator=generator, dtype=torch.float64) for number in (drafts, rows)]
    for uniform in uniforms:
        uniform[torch.rand(len(uniform), generator=generator) < 0.2] = draw(st.sampled_from([0, 1 - 2**-53]))
    return p, q if draw(st.booleans()) else None, tokens, starts_of(counts), *uniforms


@settings(max_examples=100)
@given(batches())
def test_it_is_the_algorithm_in_plain_numbers(batch):
    """In Python's whole numbers of 2**-52, one id after the other; and nothing of probability 0 comes out."""
    p, q, tokens, starts, accept, draw = batch
    accepted, following = verify(*batch)
    assert (accepted.dtype, following.dtype) == (torch.int32, torch.int64)
    for number, (first, stop) in enumerate(pairwise(starts.tolist())):
        count, token = int(accepted[number]), int(following[number])
        for at in range(first, first + count):
            x = int(tokens[at])
            assert float(accept[at]) * (1.0 if q is None else float(q[at, x])) < float(p[at + number, x])
        at = first + count
        weights = [int(value * 2**52) for value in p[at + number].double().tolist()]
        if at < stop and tokens[at] >= 0:
            x = int(tokens[at])
            assert not float(accept[at]) * (1.0 if q is None else float(q[at, x])) < float(p[at + number, x])
            own = q[at].double().tolist() if q is not None else [float(n == x) for n in range(p.shape[1])]
            left = [max(0, weight - int(value * 2**52)) for weight, value in zip(weights, own, strict=True)]
            weights = left if any(left) else weights
        else:
            assert at == stop or tokens[at] == -1
        wanted = min(int(float(draw[at + number]) * sum(weights)), sum(weights) - 1)
        assert sum(weights[:token]) <= wanted < sum(weights[: token + 1])
        assert p[at + number, token] > 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_perfect_draft_is_always_accepted(uniform):
    p = torch.rand(9, 33, generator=torch.Generator().manual_seed(4))
    p /= p.sum(1, keepdim=True)
    tokens = torch.arange(8) * 4
    accept, draw = torch.full((8,), uniform, dtype=torch.float64), torch.full((9,), 0.5).double()
    accepted, _ = verify(p, p[:8], tokens, starts_of([8]), accept, draw)
    assert accepted.tolist() == [8]


@pytest.mark.parametrize("hot", [True, False])
def test_a_hostile_draft_is_never_accepted(hot):
    """It proposes what cannot come, even where the uniform is 0."""
    p, q = torch.tensor([[0.0, 0.5, 0.5]]).repeat(2, 1), torch.tensor([[1.0, 0.0, 0.0]])
    for draw, expected in ((0.0, 1), (0.5 - 2**-53, 1), (0.5, 2), (1 - 2**-53, 2), (1.0, 2)):
        uniforms = torch.zeros(1).double(), torch.tensor([draw, 0.0], dtype=torch.float64)
        accepted, following = verify(p, None if hot else q, torch.tensor([0]), starts_of([1]), *uniforms)
        assert (accepted.tolist(), following.tolist()) == ([0], [expected])


def nothing_left() -> tuple[Tensor, ...]:
    """p and q agree but for one rounding, at the draft: no other id has more in p than in q."""
    p = torch.tensor([[0.25, 0.75 - 2**-23, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.25, 0.75, 0.0]])
    uniforms = (torch.tensor(values, dtype=torch.float64) for values in ([1 - 2**-53], [0.9, 0.0]))
    return p, q, torch.tensor([1]), starts_of([1]), *uniforms


def test_a_rejection_where_nothing_is_left_draws_from_the_target():
    accepted, following = verify(*nothing_left())
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_a_row_of_nothing_gives_no_token():
    for row in ([0.0, 0.0], [float("nan")] * 3):
        accepted, following = verify(
            torch.tensor([row]), None, torch.zeros(0).long(), starts_of([0]), torch.zeros(0), torch.zeros(1)
        )
        assert (accepted.tolist(), following.tolist()) == ([0], [-1])


def test_an_id_outside_the_vocabulary_is_no_draft():
    """Padding ends the drafts, and the token comes from all of p, not from what a rejection leaves."""
    p, q = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    for padding in (-1, 2):
        uniforms = torch.zeros(2).double(), torch.zeros(3).double()
        accepted, following = verify(p, q, torch.tensor([0, padding]), starts_of([2]), *uniforms)
        assert (accepted.tolist(), following.tolist()) == ([1], [0])


def test_matched_samples_are_those_of_a_run_without_drafts():
    """Drafts all accepted; the second of three wrong; none at all; padding."""
    samples = torch.tensor([5, 6, 7, 1, 2, 3, 4, 9, 8, 0])
    drafts = torch.tensor([5, 6, 1, 9, 3, -1])
    accepted, following = match_samples(samples, drafts, starts_of([2, 3, 0, 1]))
    assert (accepted.tolist(), following.tolist()) == ([2, 1, 0, 0], [7, 2, 9, 8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 3)}, "target has 2 rows"),
        ({1: torch.zeros(2, 3)}, r"draft is \[2, 3\]"),
        ({4: torch.zeros(2)}, "accept_uniforms"),
        ({5: torch.zeros(2)}, "draw_uniforms"),
    ],
)
def test_shapes_that_disagree_are_refused(change, message):
    arguments = {
        0: torch.zeros(3, 3),
        1: torch.zeros(1, 3),
        2: torch.tensor([0]),
        3: starts_of([1, 0]),
        4: torch.zeros(1),
        5: torch.zeros(3),
    }
    with pytest.raises(ValueError, match=message):
        verify(*(arguments | change).values())
