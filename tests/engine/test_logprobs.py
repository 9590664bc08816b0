"""The log-probability of the token that was drawn, and the same token's in the list of alternatives."""

import numpy as np
import pytest
import torch

from megaspan.engine.sampler import Sampled, Sampler
from megaspan.engine.sampling import SamplingParams
from megaspan.ops import logits as ops_logits

VOCABULARY, WIDTH = 20, 27  # ids from 20 on are padding; 20 alternatives are the most that can be asked for
PROMPT, GENERATED = [1, 5, 5, 9], [5, 16, 16, 16]
OPTIONS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "temperature": {"temperature": 1.7},
    "ranked": {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"repetition_penalty": 1.8, "presence_penalty": 1.5, "frequency_penalty": -0.7},
    "greedy, penalized": {"temperature": 0, "repetition_penalty": 3.0},
    "biased": {"logit_bias": {3: 4.0, 4: -100.0}},
    "banned": {"temperature": 0, "min_tokens": 99, "stop_token_ids": tuple(range(10))},
}


@pytest.fixture(params=["compiled", "PyTorch"])
def version(request, monkeypatch):
    if request.param == "PyTorch":
        monkeypatch.setattr(ops_logits, "supports", lambda logits: False)
    elif not ops_logits.supports(torch.zeros(1, 1)):
        pytest.skip("no C compiler here")


def sample(logits: torch.Tensor, **options) -> Sampled:
    sampler = Sampler(VOCABULARY, len(logits))
    for slot in range(len(logits)):
        sampler.admit(slot, SamplingParams(**options), PROMPT, GENERATED, seed=slot)
    return sampler.sample(logits, range(len(logits)), [4] * len(logits))


def logits_of(scale: float, rows: int = 40) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)) * scale


@pytest.mark.parametrize("scale", [0.01, 3.0, 40.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_chosen_tokens_is_its_entry_among_the_alternatives_bit_for_bit(version, name, scale):
    """Clients look the token up in its own list, so a last digit that differs is seen."""
    sampled = sample(logits_of(scale), **OPTIONS[name], logprobs=VOCABULARY)
    assert not sampled.failed
    for token_id, logprob, top in zip(sampled.token_ids, sampled.logprobs, sampled.top, strict=True):
        assert top is not None
        assert len(top) == VOCABULARY
        assert np.float32(dict(top)[int(token_id)]).tobytes() == logprob.tobytes()
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)


@pytest.mark.parametrize("scale", [0.01, 3.0, 40.0])
def test_asking_for_alternatives_changes_no_bit_of_the_tokens_own(version, scale):
    """Greedy requests that ask for nothing take a shorter way to the same number."""
    asking, plain = (sample(logits_of(scale), temperature=0, logprobs=wanted) for wanted in (1, None))
    assert plain.top == [None] * 40
    assert np.array_equal(asking.token_ids, plain.token_ids)
    assert asking.logprobs.tobytes() == plain.logprobs.tobytes()
