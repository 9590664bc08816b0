"""What a client is told when the engine fails its request: whose fault it was, and whether to ask again."""

import pytest

from tests.server.asking import QUESTION, ask, events
from tests.server.fake_engine import FakeEngine

BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 9},
    "/generate": {"text": "x"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("kind", "status", "openai_type", "anthropic_type"),
    [
        ("grammar", 400, "invalid_request_error", "invalid_request_error"),
        ("memory", 503, "server_error", "overloaded_error"),
        ("internal", 500, "server_error", "api_error"),
    ],
)
def test_the_kind_of_failure_decides_the_status(path, kind, status, openai_type, anthropic_type):
    response = ask(FakeEngine(failing=kind), path, BODIES[path])
    assert response.status_code == status
    assert ("retry-after" in response.headers) == (kind == "memory")
    error = response.json()["error"]
    assert error["type"] == (anthropic_type if "messages" in path else openai_type)
    assert "no numbers" in error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", ["grammar", "memory", "internal"])
def test_a_failure_in_mid_stream_is_the_last_event(path, kind):
    last = events(ask(FakeEngine(failing=kind), path, {**BODIES[path], "stream": True}))[-1]
    assert "no numbers" in last["error"]["message"]


def test_a_grammar_does_not_make_the_engines_failures_the_clients():
    body = {**BODIES["/v1/completions"], "guided_regex": "a+"}
    assert ask(FakeEngine(failing="internal"), "/v1/completions", body).status_code == 500
    assert ask(FakeEngine(failing="memory"), "/v1/completions", body).status_code == 503
