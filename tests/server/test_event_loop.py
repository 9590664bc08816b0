"""What is slow runs beside the event loop, so that everybody else's stream goes on meanwhile."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from megaspan.engine.grammar_compiler import GrammarCompiler
from megaspan.server import json_body, options
from tests.server.asking import QUESTION, app_of
from tests.server.fake_engine import FakeEngine, shipped_tokenizer
from tests.server.live_server import live_server
from tests.server.small_model import LONG_TEXT, assert_idle, at_once

SLOW = 0.4  # seconds that one slow call takes
BOOK = LONG_TEXT * 2500  # 1.6 MB
LONG_CONTEXT = 1 << 19  # tokens, which allow a body of 8 MB
CHAT = {"messages": QUESTION, "max_tokens": 4}
TEXT = {"prompt": "x", "max_tokens": 4}
ENDPOINTS = [
    ("encode", "/v1/completions", TEXT),
    ("encode", "/generate", {"text": "x"}),
    ("encode", "/tokenize", {"text": "x"}),
    ("decode", "/detokenize", {"tokens": [1]}),
    ("apply_chat_template", "/v1/chat/completions", CHAT),
    ("apply_chat_template", "/v1/messages", CHAT),
    ("apply_chat_template", "/v1/messages/count_tokens", {"messages": QUESTION}),
    ("prepare", "/v1/completions", TEXT),
    ("prepare", "/generate", {"input_ids": [1]}),
    ("prepare", "/v1/chat/completions", CHAT),
    ("prepare", "/v1/messages", CHAT),
]


def make_slow(monkeypatch: Any, owner: Any, name: str) -> list[str]:
    """The next call of a method takes a while; what is returned lists the calls."""
    usual, calls = getattr(owner, name), []

    def slow(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            time.sleep(SLOW)
        return usual(*arguments, **keywords)

    monkeypatch.setattr(owner, name, slow)
    return calls


def loop_gap(engine: FakeEngine, path: str, **request: Any) -> tuple[float, float, httpx.Response]:
    """Seconds that the event loop stood still at most, and that the whole request took; the answer."""
    app = app_of(engine)
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)

    async def ask() -> httpx.Response:
        beating = asyncio.ensure_future(beat())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            response = await client.post(path, **request)
        beating.cancel()
        return response

    start = time.perf_counter()
    response = asyncio.run(ask())
    return max(gaps), time.perf_counter() - start, response


@pytest.mark.parametrize(("method", "path", "body"), ENDPOINTS)
def test_the_loop_turns_while_a_request_is_prepared(monkeypatch, method, path, body):
    engine = FakeEngine()
    calls = make_slow(monkeypatch, engine if method == "prepare" else shipped_tokenizer(), method)
    longest_gap, _, response = loop_gap(engine, path, json=body)
    assert response.status_code == 200
    assert calls
    assert longest_gap < 0.7 * SLOW


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"text": BOOK}),
        ("/v1/completions", {"prompt": BOOK, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": BOOK}], "max_tokens": 1}),
    ],
    ids=["tokenize", "completions", "chat"],
)
def test_the_loop_turns_while_a_long_text_is_encoded(path, body):
    """In a thread, and with the interpreter left to others for most of the time."""
    longest_gap, seconds, response = loop_gap(FakeEngine(max_context=1 << 20), path, json=body)
    assert response.status_code == 200
    assert seconds > 0.1
    assert longest_gap < seconds / 2


def filled(head: str, unit: str, tail: str, count: int | None = None) -> bytes:
    """JSON of so many units, or of as many as a body may hold."""
    space = options.BYTES_PER_TOKEN * LONG_CONTEXT - len(head) - len(tail)
    return (head + (unit * (count or space // len(unit.encode()))).rstrip(",") + tail).encode()


CONTENT = '{"max_tokens": 1, "messages": [{"role": "user", "content": '
LARGE = {
    "ids": ("/v1/completions", filled('{"prompt": [', "1,", "]}")),
    "lists": ("/v1/completions", filled('{"prompt": [', "[],", "]}")),
    "objects": ("/v1/messages", filled('{"max_tokens": 1, "messages": [', "{},", "]}")),
    "as many objects as allowed": (
        "/v1/chat/completions",
        filled('{"messages": [', "{},", "]}", json_body.MOST_PARTS - 4),
    ),
    "as many parts as allowed": (
        "/v1/chat/completions",
        filled(CONTENT + "[", '{"type":"text","text":"x"},', "]}]}", json_body.MOST_PARTS // 3 - 5),
    ),
    "one long text": ("/v1/chat/completions", filled(CONTENT + '"', "x[0] = y, ", '"}]}')),
    "escapes": ("/v1/completions", filled('{"prompt": "', '\\"', '"}')),
    "spelled special tokens": ("/v1/chat/completions", filled(CONTENT + '"', "<|user|>", '"}]}')),
}


@pytest.mark.parametrize("kind", LARGE)
def test_the_loop_turns_while_a_large_body_is_read(kind):
    """P59 of the API: parsing and checking it took half a minute, in which nobody else was answered."""
    path, content = LARGE[kind]
    longest_gap, seconds, response = loop_gap(
        FakeEngine("x", max_context=LONG_CONTEXT),
        path,
        content=content,
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code in (200, 400)
    assert longest_gap < SLOW
    assert seconds < 10


def test_streams_go_on_while_a_grammar_compiles(monkeypatch, real_base, real_engine):
    """P59 of the API: one client's schema is not every client's pause."""
    calls = make_slow(monkeypatch, GrammarCompiler, "compile")
    ended: dict[str, float] = {}
    moments: list[float] = []

    def constrained() -> None:
        body = {"prompt": "x", "guided_choice": ["yes", "no"], "max_tokens": 4}
        answer = httpx.post(f"{real_base}/v1/completions", json=body, timeout=30).json()
        ended["constrained"] = time.perf_counter()
        assert answer["choices"][0]["text"] in ("yes", "no")

    def free() -> None:
        body = {"prompt": LONG_TEXT, "stream": True, "max_tokens": 300, "ignore_eos": True}
        with httpx.stream("POST", f"{real_base}/v1/completions", json=body, timeout=30) as response:
            for _ in response.iter_lines():
                moments.append(time.perf_counter())
                if "constrained" in ended:
                    return

    at_once(free, constrained)
    assert calls
    before = [moment for moment in moments if moment < ended["constrained"]]
    gaps = [later - earlier for earlier, later in pairwise(before)]
    assert len(before) > 10
    assert max(gaps) < 0.7 * SLOW
    assert_idle(real_engine)


def test_a_client_that_leaves_while_its_request_is_prepared_leaves_nothing(monkeypatch):
    """P63: its prompt has not reached the engine, and does not afterwards."""
    engine = FakeEngine()
    app = app_of(engine)
    make_slow(monkeypatch, engine, "prepare")
    with live_server(app) as base:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{base}/v1/completions", json=TEXT, timeout=httpx.Timeout(5, read=SLOW / 3))
        time.sleep(SLOW)
        assert not engine.submitted
        assert not app.state.service.running


def test_a_server_that_begins_to_drain_meanwhile_turns_the_request_away(monkeypatch):
    engine = FakeEngine()
    app = app_of(engine)
    make_slow(monkeypatch, engine, "prepare")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            asking = asyncio.ensure_future(client.post("/v1/completions", json=TEXT))
            await asyncio.sleep(SLOW / 3)
            app.state.service.draining = True
            return await asking

    assert asyncio.run(ask()).status_code == 503
    assert not engine.submitted
    assert not app.state.service.running
