"""Repetition, departures and crowds over HTTP against the true engine on a small random model."""

import threading
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.live_server import wait_until
from tests.server.small_model import LONG_TEXT, assert_idle, at_once, served, small_engine

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_generate_twice_gives_the_same_ids_and_log_probabilities(real_base):
    params = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, "logprobs": 1}
    body = {"text": LONG_TEXT[:200], "sampling_params": params}
    first, second = (httpx.post(f"{real_base}/generate", json=body, timeout=30).json() for _ in range(2))
    assert len(first["output_ids"]) == len(first["logprobs"]) == 12
    for field in ("output_ids", "logprobs", "text"):
        assert first[field] == second[field]
    assert second["meta_info"]["cached_tokens"] > 0
    assert first["meta_info"]["weights_version"] == second["meta_info"]["weights_version"]


def test_a_closed_connection_frees_everything(real_base, real_engine):
    """P63: while the prompt is read, while a reply streams, while a whole reply is awaited."""
    aborted = real_engine.stats().requests_total["abort"]
    endless = {"prompt": LONG_TEXT, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{real_base}/v1/completions", json={**endless, "stream": True}) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{real_base}/v1/completions", json=endless, timeout=httpx.Timeout(30, read=0.3))
    body = {**endless, "prompt": [*range(100, 4000)]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{real_base}/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.05))
    # The last one may have left before the engine knew of it.
    wait_until(lambda: real_engine.stats().requests_total["abort"] >= aborted + 2)
    assert_idle(real_engine)


def test_many_clients_at_once_get_what_each_gets_alone(real_base, real_engine):
    """Of all three protocols, some of which leave early."""

    def completion(number: int) -> Any:
        body = {"prompt": f"def f{number}(", "max_tokens": 10, "temperature": 0, "logprobs": 1}
        return httpx.post(f"{real_base}/v1/completions", json=body, timeout=60).json()["choices"]

    def message(number: int) -> Any:
        body = {"max_tokens": 10, "temperature": 0, "messages": [{"role": "user", "content": f"{number}?"}]}
        return httpx.post(f"{real_base}/v1/messages", json=body, timeout=60).json()["content"]

    def leaving(number: int) -> None:
        body = {"text": f"class C{number}", "stream": True, "sampling_params": {"ignore_eos": True}}
        with httpx.stream("POST", f"{real_base}/generate", json=body, timeout=60) as response:
            next(response.iter_lines())

    calls = [lambda n=n: completion(n) for n in range(10)] + [lambda n=n: message(n) for n in range(10)]
    leavers = [lambda n=n: leaving(n) for n in range(6)]
    together = at_once(*calls, *leavers)[:20]
    assert [call() for call in calls] == together


def test_an_abort_by_id_ends_the_stream(real_base):
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    lines: list[str] = []

    def read() -> None:
        request = {"json": body, "headers": {"X-Request-Id": "mine"}, "timeout": 60}
        with httpx.stream("POST", f"{real_base}/v1/completions", **request) as response:
            for line in response.iter_lines():
                lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: lines)
    assert httpx.post(f"{real_base}/abort", json={"request_id": "mine"}).status_code == 200
    reader.join(20)
    assert '"finish_reason":"abort"' in "".join(lines)


def test_a_flush_forgets_prefixes(real_base):
    body = {"text": LONG_TEXT, "sampling_params": {"max_new_tokens": 1}}

    def cached() -> int:
        return httpx.post(f"{real_base}/generate", json=body, timeout=30).json()["meta_info"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert httpx.post(f"{real_base}/flush_cache").json()["pages"] > 0
    assert cached() == 0


def test_a_full_queue_is_429_and_those_in_it_are_served():
    engine = small_engine(max_running=1, max_waiting=2)
    body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
    with served(engine) as base:
        responses = at_once(*[partial(httpx.post, f"{base}/v1/completions", json=body, timeout=60)] * 8)
        assert_idle(engine)
    refused = [response for response in responses if response.status_code == 429]
    assert 0 < len(refused) <= 5
    assert all(response.headers["Retry-After"] for response in refused)
    assert {response.status_code for response in responses} == {200, 429}
