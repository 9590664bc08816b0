"""Fields of the wrong type, unknown ones that mean something, absurd numbers: 400, and the field is named."""

import pytest

from tests.server.asking import QUESTION, ask
from tests.server.fake_engine import FakeEngine

COMPLETIONS = ("/v1/completions", {"prompt": "x", "max_tokens": 4})
CHAT = ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 4})
MESSAGES = ("/v1/messages", {"messages": QUESTION, "max_tokens": 4})


def refusal(endpoint, fields, engine=None):
    path, body = endpoint
    engine = engine or FakeEngine()
    response = ask(engine, path, {**body, **fields})
    assert response.status_code == 400, response.text
    assert not engine.submitted
    return response.json()["error"]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "0.5"},
        {"temperature": True},
        {"top_p": "1"},
        {"top_k": 5.0},
        {"top_k": -2},
        {"seed": "7"},
        {"n": "2"},
        {"n": True},
        {"stream": "true"},
        {"stream": 1},
        {"ignore_eos": 0},
        {"stop_token_ids": [True]},
        {"max_tokens": 1e30},
        {"max_tokens": 10**30},
        {"max_tokens": (1 << 31) + 1},
        {"max_tokens": "4"},
        {"min_tokens": -1},
        {"skip_special_tokens": False},
        {"include_reasoning": False},
        {"spaces_between_special_tokens": False},
        {"use_beam_search": True},
        {"best_of": 0},
        {"length_penalty": 0},
        {"prompt_logprobs": 0},
        {"frobnicate": False},
        {"frobnicate": 0},
    ],
    ids=str,
)
def test_what_would_change_the_meaning_is_refused_by_name(endpoint, fields):
    (name,) = fields
    error = refusal(endpoint, fields)
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_values_that_hold_here_anyway_are_passed_over(endpoint):
    path, body = endpoint
    held = {
        "skip_special_tokens": True,
        "include_reasoning": True,
        "use_beam_search": False,
        "best_of": 1,
        "length_penalty": 1,
        "suffix": "",
        "functions": [],
        "frobnicate": None,
        "temperature": 1,
    }
    assert ask(FakeEngine(), path, {**body, **held}).status_code == 200


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_ways_to_say_all_tokens(top_k):
    engine = FakeEngine()
    path, body = COMPLETIONS
    assert ask(engine, path, {**body, "top_k": top_k}).status_code == 200
    assert engine.submitted[0].params.top_k == 0


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is():
    engine = FakeEngine(max_context=100)
    path, body = COMPLETIONS
    assert ask(engine, path, {**body, "max_tokens": 1 << 31}).status_code == 200
    assert engine.submitted[0].params.max_tokens == 99


@pytest.mark.parametrize(
    "prompt", [[True], [1.0], [1, True], [[1.0]], [[1], True], ["x", 1], [None], 7, None]
)
def test_what_is_no_prompt_is_no_token_id_either(prompt):
    assert refusal(COMPLETIONS, {"prompt": prompt})["param"] == "prompt"
    assert refusal(("/generate", {}), {"input_ids": prompt})["param"] == "input_ids"


@pytest.mark.parametrize(
    ("endpoint", "fields", "name"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [99_999]}, "prompt"),
        (COMPLETIONS, {"prompt": [99_999], "echo": True}, "prompt"),
        (COMPLETIONS, {"prompt": "a b " * 50}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 100}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 50}]}, "messages"),
        (("/generate", {}), {"text": "a b " * 50}, "text"),
        (("/generate", {}), {"input_ids": [5] * 100}, "input_ids"),
        (("/tokenize", {}), {"text": "a b " * 100}, "text"),
        (("/detokenize", {}), {"tokens": [99_999]}, "tokens"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_named(endpoint, fields, name):
    error = refusal(endpoint, fields, FakeEngine(max_context=100))
    assert error["param"] == name
    too_long = len(str(fields)) > 200
    assert error["code"] == ("context_length_exceeded" if too_long else None)


def test_anthropics_fields_are_as_strict():
    for fields in (
        {"max_tokens": "4"},
        {"max_tokens": 1 << 32},
        {"temperature": "1"},
        {"top_k": -1},
        {"x": 0},
    ):
        (name,) = fields
        assert name in refusal(MESSAGES, fields)["message"]
