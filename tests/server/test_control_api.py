"""What is not generation: models, health, metrics, figures, cache, abort, tokens, the page."""

import asyncio
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.asking import MODEL, QUESTION, app_of, ask
from tests.server.fake_engine import FakeEngine


def test_models_are_listed_and_found():
    models = ask(FakeEngine(), "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [(MODEL, 2048)]
    assert ask(FakeEngine(), f"/v1/models/{MODEL}").json()["id"] == MODEL
    missing = ask(FakeEngine(), "/v1/models/gpt/4")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_health_tells_of_draining_and_of_a_dead_engine():
    engine = FakeEngine()
    app = app_of(engine)
    assert ask(app, "/health").status_code == 200
    app.state.service.draining = True
    assert ask(app, "/health").status_code == 503
    refused = ask(app, "/v1/completions", {"prompt": "x"})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    app.state.service.draining = False
    engine.is_alive = False
    assert ask(app, "/health").status_code == 503
    assert ask(app, "/v1/completions", {"prompt": "x"}).status_code == 503
    assert ask(app, "/v1/messages", {"messages": QUESTION, "max_tokens": 1}).json()["error"]["type"] == (
        "overloaded_error"
    )


def test_a_full_queue_turns_requests_away():
    """The engine decides; what was handed over before it said so is taken back."""
    engine = FakeEngine(max_waiting=1)
    response = ask(engine, "/v1/completions", {"prompt": ["x", "y"]})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert not engine.running
    assert ask(engine, "/v1/completions", {"prompt": "x"}).status_code == 200


def test_metrics_have_vllms_names_and_count_requests():
    engine = FakeEngine("one two three")
    app = app_of(engine)
    ask(app, "/v1/completions", {"prompt": "x"})
    families = {each.name: each for each in text_string_to_metric_families(ask(app, "/metrics").text)}
    value = {name: family.samples[0].value for name, family in families.items()}
    assert value["megaspan:num_requests_running"] == 0
    assert value["megaspan:prompt_tokens"] == 1
    assert value["megaspan:generation_tokens"] == engine.generated
    assert 0 < value["megaspan:kv_cache_usage_perc"] < 1
    assert {"megaspan:prefix_cache_queries", "megaspan:prefix_cache_hits"} <= families.keys()
    ended = families["megaspan:request_success"].samples
    assert [(each.labels["finished_reason"], each.value) for each in ended] == [("stop", 1)]
    for name, count in (("time_to_first_token", 1), ("inter_token_latency", 3), ("e2e_request_latency", 1)):
        samples = {each.name: each.value for each in families[f"megaspan:{name}_seconds"].samples}
        assert samples[f"megaspan:{name}_seconds_count"] == count


def test_stats_show_the_engine_and_the_last_times():
    app = app_of(FakeEngine())
    before = ask(app, "/stats").json()
    assert before["time_to_first_token_p50"] is None
    assert (before["model"], before["max_context"], before["pages_total"]) == (MODEL, 2048, 128)
    ask(app, "/v1/completions", {"prompt": "x"})
    assert ask(app, "/stats").json()["time_to_first_token_p50"] > 0


def test_the_cache_is_flushed_on_demand():
    assert ask(FakeEngine(), "/flush_cache", {}).json() == {"pages": 5}


@pytest.mark.parametrize("prefix", ["", "cmpl-"])
def test_a_running_request_is_aborted_by_its_id(prefix):
    engine = FakeEngine("one two three", delay=5)
    app = app_of(engine)

    async def start_and_abort():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"prompt": ["x", "y"]}
            headers = {"X-Request-Id": "mine"}
            running = asyncio.ensure_future(client.post("/v1/completions", json=body, headers=headers))
            while len(engine.running) < 2:
                await asyncio.sleep(0.001)
            aborted = await client.post("/abort", json={"request_id": f"{prefix}mine"})
            return aborted, await running, await client.post("/abort", json={"request_id": "mine"})

    aborted, answer, again = asyncio.run(start_and_abort())
    assert (aborted.status_code, again.status_code) == (200, 404)
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["abort"] * 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_request_is_aborted_while_it_is_prepared(monkeypatch, path):
    """P63: its prompt is being encoded, and does not reach the engine afterwards."""
    engine = FakeEngine()
    app = app_of(engine)
    going_on, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(engine, "prepare", lambda *_: going_on.set() or ended.wait(10))

    async def start_and_abort():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"prompt": "x"} if "completions" in path else {"messages": QUESTION, "max_tokens": 4}
            running = asyncio.ensure_future(client.post(path, json=body, headers={"X-Request-Id": "mine"}))
            await asyncio.to_thread(going_on.wait, 10)
            aborted = await client.post("/abort", json={"request_id": "mine"})
            answer = await asyncio.wait_for(running, 5)
            ended.set()
            return aborted, answer, await client.post("/abort", json={"request_id": "mine"})

    aborted, answer, again = asyncio.run(start_and_abort())
    assert (aborted.status_code, answer.status_code, again.status_code) == (200, 499, 404)
    assert "aborted" in answer.json()["error"]["message"]
    assert not engine.submitted
    assert not app.state.service.running


def test_text_becomes_tokens_and_tokens_text():
    text = "def f():\n    return '<think>ö'"
    told = ask(FakeEngine(), "/tokenize", {"text": text}).json()
    assert told["count"] == len(told["tokens"]) > 3
    assert ask(FakeEngine(), "/detokenize", {"tokens": told["tokens"]}).json() == {"text": text}
    assert ask(FakeEngine(), "/detokenize", {"tokens": []}).json() == {"text": ""}
    assert ask(FakeEngine(), "/detokenize", {"tokens": [-1]}).status_code == 400


def test_the_page_and_its_files_are_served_to_everyone():
    app = app_of(FakeEngine(), api_keys=("k",))
    page = ask(app, "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert ask(app, "/app.js").headers["content-type"].startswith("text/javascript")
    assert ask(app, "/../app.py").status_code == 401
    assert ask(app_of(FakeEngine()), "/../app.py").status_code == 404


def test_wrong_paths_and_methods_are_told_apart():
    missing, wrong = ask(FakeEngine(), "/v1/nothing"), ask(FakeEngine(), "/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    assert ask(FakeEngine(), "/v1/messages/nothing").json()["type"] == "error"
