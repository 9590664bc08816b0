import dataclasses
import math

import pytest

from megaspan.engine.sampling import Grammar, SamplingParams
from megaspan.errors import UserError

REFUSED = [
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 1 << 80),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e9),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.inf),
    ("seed", 1 << 64),
    ("seed", "7"),
    ("logprobs", 21),
    ("logprobs", -1),
    ("stop", "text"),
    ("stop", ("",)),
    ("stop", (7,)),
    ("stop", ("x",) * 17),
    ("stop", ("x" * 2000,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", 7),
    ("stop_token_ids", tuple(range(2000))),
    ("ignore_eos", 1),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"7": 1.0}),
    ("logit_bias", {7: math.nan}),
    ("logit_bias", {7: 101}),
    ("logit_bias", {7: None}),
    ("logit_bias", 7),
    ("logit_bias", dict.fromkeys(range(2000), 1.0)),
    ("grammar", "text"),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: repr(value)[:20])
def test_what_makes_no_sense_is_refused_in_one_line_that_names_the_field(field, value):
    with pytest.raises(UserError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_number_too_long_to_print_is_refused():
    with pytest.raises(UserError, match="seed is a very large number"):
        SamplingParams(seed=10**5000)


def test_fields_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(UserError, match="min_tokens"):
        SamplingParams(min_tokens=4, grammar=Grammar("json"))


def test_edges_are_allowed():
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, logprobs=20, max_tokens=1, min_tokens=1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01, seed=-(1 << 63))
    SamplingParams(stop=("x",) * 16, seed=(1 << 64) - 1, max_tokens=None, logprobs=0)


def test_parameters_can_be_shared_and_are_stored_in_one_form():
    params = SamplingParams(logit_bias={9: 1, 3: -2.5}, stop=["a"], stop_token_ids=[4])
    assert params.logit_bias == ((3, -2.5), (9, 1.0))
    assert (params.stop, params.stop_token_ids) == (("a",), (4,))
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_greedy_is_no_temperature_or_one_candidate():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams(temperature=0.01, top_k=2).greedy


def test_only_what_looks_back_is_penalized():
    assert not SamplingParams(temperature=0.5, top_p=0.5, logit_bias={1: 1.0}).penalized
    for penalty in ({"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}):
        assert SamplingParams(**penalty).penalized


def test_grammar_is_checked():
    for arguments in (
        ("xml",),
        ("regex", 7),
        ("regex", "x" * (2 << 20)),
        ("json", "", -1),
        ("json", "", 1.0),
    ):
        with pytest.raises(UserError):
            Grammar(*arguments)
    assert Grammar.choice(["a", 'b"']) == Grammar("choice", '["a", "b\\""]')
