"""Whatever our OpenAPI allows, on the true engine: never a 500, and nothing is left behind."""

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.server.asking import MODEL, QUESTION, app_of
from tests.server.fake_engine import FakeEngine
from tests.server.small_model import assert_idle, served, small_engine

SETTINGS = hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.generate],
)
GOOD = {
    "/v1/chat/completions": {"messages": QUESTION, "model": MODEL},
    "/v1/completions": {"prompt": "x", "model": MODEL},
    "/v1/messages": {"messages": QUESTION, "model": MODEL},
    "/generate": {"text": "x"},
}
FIELDS = {
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 20000),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.integers(-(1 << 63), (1 << 64) - 1),
    "min_tokens": st.integers(0, 6),
    "n": st.integers(1, 3),
    "logprobs": st.integers(0, 20),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 12287), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 12287).map(str), st.floats(-100, 100), max_size=3),
    "guided_choice": st.just(["yes", "no"]),
    "return_token_ids": st.booleans(),
}
schema = schemathesis.openapi.from_dict(app_of(FakeEngine()).openapi())  # no engine is part of it


@pytest.fixture(scope="module")
def engine():
    return small_engine(max_context=160)  # a request without max_tokens fills it


@pytest.fixture(scope="module")
def base(engine):
    with served(engine) as address:
        yield address


def check(case, base):
    response = case.call(base_url=base, timeout=30)
    assert response.status_code < 500, response.text


@schema.parametrize()
@SETTINGS
def test_generated_requests(case, base):
    check(case, base)


@schema.include(method="POST", path=list(GOOD)).parametrize()
@SETTINGS
def test_generated_fields_beside_a_good_prompt(case, base):
    """Most generated bodies fail at their prompt; with a good one their other fields reach the engine."""
    if not isinstance(case.body, dict):
        return
    case.body.update(GOOD[case.path])
    case.body.pop("input_ids", None)
    check(case, base)


@given(st.fixed_dictionaries({}, optional=FIELDS))
@hypothesis.settings(SETTINGS, max_examples=40)
def test_sampling_fields_in_their_ranges(base, fields):
    """Any combination of them is served, whole or streamed."""
    if "guided_choice" in fields:
        fields.pop("min_tokens", None)  # the two are refused together
    body = {"prompt": "x", "max_tokens": 6, **fields}
    response = httpx.post(f"{base}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        for choice in response.json()["choices"]:
            assert choice["finish_reason"] in ("stop", "length")


def test_nothing_is_left(engine):
    assert_idle(engine)
    assert sum(engine.stats().requests_total.values()) > 40
    assert engine.is_alive
