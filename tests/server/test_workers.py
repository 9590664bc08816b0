"""What is slow runs on a few threads: nobody waits there who has left, and not too many wait."""

import asyncio
import threading
from contextlib import suppress

import httpx

from megaspan.server import service as service_module
from megaspan.server.service import MOST_COMPILING, WORKERS, Service
from megaspan.token_budget import TokenBudget
from tests.server.asking import MODEL, app_of
from tests.server.fake_engine import FakeEngine, shipped_tokenizer
from tests.server.live_server import live_server, wait_until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}


async def blocked(service: Service) -> threading.Event:
    """Every worker is busy until the event is set."""
    busy, release = threading.Barrier(WORKERS + 1), threading.Event()

    def block() -> None:
        busy.wait(10)
        release.wait(10)

    for _ in range(WORKERS):
        service.workers.submit(block)
    await asyncio.to_thread(busy.wait, 10)
    return release


def test_threads_are_few_however_many_ask():
    engine = FakeEngine("x")
    app = app_of(engine)

    async def ask_all():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=BODY) for _ in range(50)))

    before = set(threading.enumerate())
    assert {answer.status_code for answer in asyncio.run(ask_all())} == {200}
    working = [thread for thread in set(threading.enumerate()) - before if "megaspan" in thread.name]
    assert 1 <= len(working) <= WORKERS


def test_who_leaves_while_waiting_for_a_worker_is_not_served_by_it(monkeypatch):
    """P63: neither is the prompt encoded, nor does anything of it stay."""
    engine = FakeEngine("x")
    app = app_of(engine)
    service: Service = app.state.service
    encoded: list[str] = []
    usual = shipped_tokenizer().encode

    def encode(text: str, budget: TokenBudget | None = None) -> list[int]:
        if budget is not None:  # a prompt
            encoded.append(text)
        return usual(text, budget)

    monkeypatch.setattr(shipped_tokenizer(), "encode", encode)
    with live_server(app) as base:
        release = asyncio.run(blocked(service))
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{base}/v1/completions", json={**BODY, "prompt": "left"}, timeout=0.3)
        wait_until(lambda: not service.running)
        release.set()
        assert httpx.post(f"{base}/v1/completions", json={**BODY, "prompt": "stayed"}).status_code == 200
    assert encoded == ["stayed"]


def test_more_than_so_many_are_not_prepared_at_once(monkeypatch):
    monkeypatch.setattr(service_module, "MOST_PREPARING", 3)
    app = app_of(FakeEngine("x"))

    async def ask_all():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            release = await blocked(app.state.service)
            asking = [asyncio.ensure_future(client.post("/v1/completions", json=BODY)) for _ in range(5)]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            release.set()
            return sorted([answer.status_code for answer in await asyncio.gather(*asking)])

    assert asyncio.run(ask_all()) == [200, 200, 200, 429, 429]


def test_grammars_that_take_long_to_compile_hold_up_none_but_those_with_grammars(monkeypatch):
    """They wait for one another; who has none is served meanwhile, and one too many is sent away."""
    engine = FakeEngine("x")
    app = app_of(engine)
    prepare, release = engine.prepare, threading.Event()

    def slow(prompt, params, request_id=None):
        if params.grammar is not None:
            release.wait(10)
        return prepare(prompt, params, request_id)

    monkeypatch.setattr(engine, "prepare", slow)

    async def ask_all():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            bound = {**BODY, "guided_regex": "x"}
            slow_ones = [
                asyncio.ensure_future(client.post("/v1/completions", json=bound))
                for _ in range(MOST_COMPILING + 1)
            ]
            await asyncio.wait(slow_ones, return_when=asyncio.FIRST_COMPLETED)  # the one too many
            plain = await asyncio.wait_for(client.post("/v1/completions", json=BODY), 5)
            release.set()
            return plain.status_code, sorted([(await answer).status_code for answer in slow_ones])

    assert asyncio.run(ask_all()) == (200, [*[200] * MOST_COMPILING, 429])
