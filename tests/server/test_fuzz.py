"""Whatever our OpenAPI allows, and much that it does not: never a 500, always the protocol's own error."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.checks import not_a_server_error

from tests.server.asking import MODEL, QUESTION, app_of
from tests.server.fake_engine import FakeEngine

engine = FakeEngine()
app = app_of(engine)
schema = schemathesis.openapi.from_asgi("/openapi.json", app)

SETTINGS = hypothesis.settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    phases=[hypothesis.Phase.generate],
)


def body_fields(path):
    described = app.openapi()
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return described["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]


def check(response):
    """An answer, or an error of the one shape that its path has."""
    if response.status_code < 400:
        return
    assert response.status_code < 500
    error = response.json()["error"]
    assert error["message"]
    assert "\n" not in error["message"]
    assert error["type"]


@schema.parametrize()
@SETTINGS
def test_generated_requests(case):
    response = case.call()
    case.validate_response(response, checks=[not_a_server_error])
    check(response)
    assert not engine.running


@schema.include(method="POST", path_regex="chat/completions|messages$|completions$|generate").parametrize()
@SETTINGS
def test_generated_fields_beside_a_good_prompt(case):
    """Most generated bodies fail at their prompt; with a good one the other fields are reached."""
    if not isinstance(case.body, dict):
        return
    good = {"messages": QUESTION, "model": MODEL, "prompt": "x", "text": "x"}
    fields = body_fields(case.path)
    case.body.update({name: value for name, value in good.items() if name in fields})
    case.body.pop("input_ids", None)
    response = case.call()
    case.validate_response(response, checks=[not_a_server_error])
    check(response)
    assert not engine.running


def test_every_endpoint_is_described():
    paths = set(schema.raw_schema["paths"])
    assert {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate", "/abort"} <= paths
    assert not any(path.endswith((".js", ".css")) or path == "/" for path in paths)


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    yield
    assert not app.state.service.running
