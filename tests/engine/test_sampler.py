"""Each draw against the plain reference, and that it depends on nothing but its own request."""

import dataclasses

import numpy as np
import pytest
import torch

from megaspan.engine.reference_sampler import reference_distribution
from megaspan.engine.sampler import Sampled, Sampler
from megaspan.engine.sampling import Grammar, SamplingParams

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCABULARY = 24
PROMPT, GENERATED = [10, 17, 17, 5], [5, 16, 16, 16]  # likely ones, so that a wrong penalty shows
ANY = Grammar("json")
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "encouraged": {"frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {3: 4.0, 4: -100.0}},
    "banned": {"min_tokens": 9, "stop_token_ids": (0, 18)},
    "grammar": {"grammar": ANY},
    "truncated": {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.15},
    "everything": {
        "temperature": 1.4,
        "top_k": 10,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 2.0, 7: 3.0},
        "grammar": ANY,
    },
}
GREEDY = SamplingParams(temperature=0)


def random_logits(rows: int, width: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2


def packed(allowed: set[int], width: int = VOCABULARY) -> torch.Tensor:
    """A mask row, int32 [ceil(V / 32)]."""
    bits = np.zeros(-(-width // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def draw_once(sampler: Sampler, logits: torch.Tensor, params: SamplingParams, **arguments) -> Sampled:
    sampler.admit(0, params, PROMPT, GENERATED, seed=5)
    return sampler.sample(logits, [0], [0], **arguments)


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_reference_distribution(name):
    params, requests = SamplingParams(**OPTIONS[name]), 6000
    logits = random_logits(1)
    allowed = set(range(0, VOCABULARY, 2)) | {7} if params.grammar else None
    expected = reference_distribution(
        logits[0].numpy(),
        params,
        prompt=PROMPT,
        counts={5: 1, 16: 3},
        allowed=allowed,
        banned=params.stop_token_ids if params.min_tokens else (),
    )
    sampler = Sampler(VOCABULARY, requests)
    for slot in range(requests):
        sampler.admit(slot, params, PROMPT, GENERATED, seed=slot)
    masks = packed(allowed).expand(requests, -1) if allowed else None
    sampled = sampler.sample(logits.expand(requests, -1), range(requests), [4] * requests, masks)
    counts = np.bincount(sampled.token_ids, minlength=VOCABULARY)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    freedom = possible.sum() - 1
    assert freedom > 1
    statistic = ((counts - requests * expected)[possible] ** 2 / (requests * expected[possible])).sum()
    assert statistic < freedom + 3.5 * (2 * freedom) ** 0.5


def mixed_requests(count: int) -> list[SamplingParams]:
    """Requests of every kind, some of which ask for alternatives."""
    kinds = [*OPTIONS.values(), {"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.5}]
    return [SamplingParams(**kinds[index % len(kinds)], logprobs=index % 4 or None) for index in range(count)]


def assert_row(together: Sampled, row: int, alone: Sampled) -> None:
    assert together.token_ids[row] == alone.token_ids[0]
    assert together.logprobs[row].tobytes() == alone.logprobs[0].tobytes()
    assert together.top[row] == alone.top[0]


@pytest.mark.parametrize("width", [97, 1003, 1024])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_request_draws_the_same_alone_and_in_any_batch(width, threads):
    requests = mixed_requests(65)
    logits, masks = random_logits(65, width), packed(set(range(0, width, 3)), width).repeat(65, 1)

    def drawn(rows: list[int]) -> Sampled:
        sampler = Sampler(width, 80)
        for place, row in enumerate(rows):
            sampler.admit(place + 7, requests[row], PROMPT, GENERATED, seed=row * 31)
        slots = [place + 7 for place in range(len(rows))]
        return sampler.sample(logits[rows], slots, [row % 5 for row in rows], masks[rows])

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [drawn([row]) for row in range(65)]
        assert len({int(sampled.token_ids[0]) for sampled in alone}) > 10
        for size in range(1, 66) if threads == 1 else (2, 9, 33, 65):
            rows = np.random.default_rng(size).permutation(65)[:size].tolist()
            together = drawn(rows)
            for place, row in enumerate(rows):
                assert_row(together, place, alone[row])
    finally:
        torch.set_num_threads(before)


def test_a_request_that_is_taken_up_again_goes_on_with_the_same_tokens():
    """A preempted request is admitted again, in another slot, with what it has drawn."""
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2, top_p=0.9, min_tokens=5)
    logits = random_logits(10)

    def run(interrupted_at: int) -> list[int]:
        sampler, slot, drawn = Sampler(VOCABULARY, 3), 0, []
        sampler.admit(slot, params, PROMPT, seed=-3, stop_ids=[4])
        for step in range(10):
            if step == interrupted_at:
                sampler.release(slot)
                slot = 2
                sampler.admit(slot, params, PROMPT, drawn, seed=-3, stop_ids=[4])
            drawn.append(int(sampler.sample(logits[step : step + 1], [slot], [step]).token_ids[0]))
        return drawn

    whole = run(10)
    assert len(set(whole)) > 4
    assert all(run(interrupted_at) == whole for interrupted_at in range(10))


def test_a_slot_keeps_nothing_of_its_last_request():
    logits = random_logits(1)
    sampler = Sampler(VOCABULARY, 1)
    changed = {"grammar": None, "logit_bias": {3: 100.0}}
    everything = SamplingParams(
        **{**OPTIONS["everything"], **changed}, min_tokens=3, logprobs=3, stop_token_ids=(1,)
    )
    draw_once(sampler, logits, everything)
    for params in (SamplingParams(), SamplingParams(presence_penalty=1.0)):
        fresh = draw_once(Sampler(VOCABULARY, 1), logits, params)
        assert_row(draw_once(sampler, logits, params), 0, fresh)
    sampler.release(0)
    assert sampler.sample(logits, [0], [0]).token_ids[0] == logits.argmax()


def test_penalties_count_what_was_drawn():
    sampler = Sampler(3, 1)
    sampler.admit(0, SamplingParams(temperature=0, frequency_penalty=1.0), prompt=[0, 0, 0])
    logits = torch.tensor([[2.5, 2.0, -1.0]])
    drawn = [int(sampler.sample(logits, [0], [step]).token_ids[0]) for step in range(6)]
    assert drawn == [0, 1, 0, 1, 0, 1]  # 2.5 2.0 | 1.5 2.0 | 1.5 1.0 | 0.5 1.0 | 0.5 0.0 | -0.5 0.0


def test_stop_ids_come_only_from_min_tokens_on():
    sampler, logits = Sampler(4, 1), torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(2,))
    sampler.admit(0, params, prompt=[0], stop_ids=[1])
    assert [int(sampler.sample(logits, [0], [step]).token_ids[0]) for step in range(3)] == [3, 3, 1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0, logit_bias={9: 0.5})])
def test_greedy_takes_the_lowest_id_among_equals(params):
    logits = torch.zeros(1, 300)
    logits[0, [17, 18, 255, 299]] = 3.0
    assert draw_once(Sampler(300, 1), logits, params).token_ids[0] == 17


@pytest.mark.parametrize("name", [*OPTIONS, "greedy"])
def test_ids_beyond_the_tokenizer_are_never_drawn(name):
    params = GREEDY if name == "greedy" else SamplingParams(**OPTIONS[name])
    logits = random_logits(300, VOCABULARY + 9)
    logits[:, VOCABULARY:] += 20
    sampler = Sampler(VOCABULARY, 300)
    for slot in range(300):
        sampler.admit(slot, params, [VOCABULARY + 1], [VOCABULARY + 2], seed=slot)
    sampled = sampler.sample(logits, range(300), [0] * 300, packed(set(range(20))).expand(300, -1))
    assert not sampled.failed
    assert sampled.token_ids.max() < VOCABULARY


@pytest.mark.parametrize("name", [*OPTIONS, "greedy"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_alone(name, bad):
    params = GREEDY if name == "greedy" else SamplingParams(**OPTIONS[name], logprobs=2)
    good = random_logits(4)
    for values in ([bad], [bad] * VOCABULARY):
        logits = good.clone()
        logits[2, VOCABULARY - len(values) :] = torch.tensor(values)
        sampler = Sampler(VOCABULARY, 4)
        for slot in range(4):
            sampler.admit(slot, params, PROMPT, GENERATED, seed=slot)
        masks = packed(set(range(VOCABULARY))).expand(4, -1)
        sampled = sampler.sample(logits, range(4), [0] * 4, masks)
        assert sampled.failed == [2]
        assert sampled.token_ids[2] == -1
        assert np.isnan(sampled.logprobs[2])
        assert sampled.top[2] is None
        for slot in (0, 1, 3):
            sampler.admit(slot, params, PROMPT, GENERATED, seed=slot)
            alone = sampler.sample(good[slot : slot + 1], [slot], [0], masks[:1])
            assert_row(sampled, slot, alone)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_for_which_nothing_is_left_fails_alone(temperature):
    sampler = Sampler(VOCABULARY, 2)
    for slot in range(2):
        sampler.admit(slot, SamplingParams(temperature=temperature, grammar=ANY), [], seed=slot)
    sampled = sampler.sample(random_logits(2), [0, 1], [0, 0], torch.stack([packed(set()), packed({3})]))
    assert sampled.failed == [0]
    assert sampled.token_ids.tolist() == [-1, 3]


def test_masks_are_for_requests_with_a_grammar():
    sampler = Sampler(VOCABULARY, 2)
    sampler.admit(0, GREEDY, [])
    sampler.admit(1, dataclasses.replace(GREEDY, grammar=ANY), [])
    logits = random_logits(1).expand(2, -1)
    other = (int(logits[0].argmax()) + 1) % VOCABULARY
    sampled = sampler.sample(logits, [1, 0], [0, 0], packed({other}).expand(2, -1))
    assert sampled.token_ids.tolist() == [other, int(logits[0].argmax())]


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1000.0])
def test_log_probabilities_are_those_of_the_models_own_distribution(scale):
    logits = random_logits(30, VOCABULARY + 3) * scale
    sampler = Sampler(VOCABULARY, 30)
    for slot in range(30):
        sampler.admit(slot, SamplingParams(temperature=2.0, logit_bias={3: 9.0}, top_k=9), [], seed=slot)
    sampled = sampler.sample(logits, range(30), [0] * 30)
    expected = logits.double().log_softmax(-1)[torch.arange(30), torch.from_numpy(sampled.token_ids)]
    assert sampled.logprobs.dtype == np.float32
    np.testing.assert_allclose(sampled.logprobs, expected, rtol=1e-6, atol=1e-6)


def test_alternatives_are_the_best_of_the_models_own_distribution():
    logits = random_logits(4, 50)
    logits[0] -= 10
    logits[0, [4, 9, 30]] = 7.0  # equals
    logits[0, [5, 6]] = torch.tensor([-0.0, 0.0])
    logits[3, 1:] -= 100  # shares below 2**-40 are ranked as well
    sampler = Sampler(45, 4)
    for slot, wanted in enumerate((20, 0, None, 2)):
        sampler.admit(slot, SamplingParams(logprobs=wanted, logit_bias={1: 50.0}), [])
    sampled = sampler.sample(logits, range(4), [0] * 4)
    assert sampled.top[1:3] == [(), None]
    for row, wanted in ((0, 20), (3, 2)):
        expected = logits[row].double().log_softmax(-1)
        ranked = sorted(range(45), key=lambda token, row=row: (-float(logits[row, token]), token))
        assert [token for token, _ in sampled.top[row]] == ranked[:wanted]
        for token, logprob in sampled.top[row]:
            assert logprob == pytest.approx(float(expected[token]), rel=1e-6, abs=1e-6)


def test_a_tiny_temperature_takes_the_best():
    params = SamplingParams(temperature=5e-324)
    logits = random_logits(1) * 1e3
    assert draw_once(Sampler(VOCABULARY, 1), logits, params).token_ids[0] == logits.argmax()


def test_the_same_seed_draws_differently_at_each_step():
    sampler = Sampler(VOCABULARY, 1)
    sampler.admit(0, SamplingParams(), [], seed=1)
    logits = torch.zeros(1, VOCABULARY)
    drawn = [int(sampler.sample(logits, [0], [step]).token_ids[0]) for step in range(100)]
    assert len(set(drawn)) > 20


def test_reference_refuses_when_nothing_is_left():
    with pytest.raises(ValueError, match="no token"):
        reference_distribution(np.zeros(4), SamplingParams(), allowed=[])
