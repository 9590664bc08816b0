"""Around every request: ids, keys, bounded bodies, bad bytes, clients that leave or stop reading."""

import asyncio
import json
import socket
import time
from contextlib import suppress

import httpx
import pytest

from megaspan.server.middleware import ClientGone, WatchedConnection
from tests.server.asking import QUESTION, app_of, ask
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import everything, half_a_request, live_server, wait_until

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("wanted", ["mine-1", "a:b.c_d"])
def test_a_sane_request_id_is_kept(wanted):
    response = ask(FakeEngine(), CHAT, {"messages": QUESTION}, headers={"X-Request-Id": wanted})
    assert response.headers["x-request-id"] == wanted
    assert response.json()["id"] == f"chatcmpl-{wanted}"


@pytest.mark.parametrize("wanted", ["", "a b", "x" * 129, "<script>", "é"])
def test_any_other_request_id_is_replaced(wanted):
    headers = {"X-Request-Id": wanted.encode()}
    response = ask(FakeEngine(), CHAT, {"messages": QUESTION}, headers=headers)
    assert response.status_code == 200
    assert len(response.headers["x-request-id"]) == 32


def test_a_running_requests_id_given_twice_gets_a_suffix():
    engine = FakeEngine("</think>x", delay=0.02)
    app = app_of(engine)

    async def both():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            asks = (
                client.post(CHAT, json={"messages": QUESTION}, headers={"X-Request-Id": "same"})
                for _ in range(2)
            )
            return [response.headers["x-request-id"] for response in await asyncio.gather(*asks)]

    first, second = sorted(asyncio.run(both()))
    assert first == "same"
    assert second.startswith("same-")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "second"}, 401),
        ({"x-api-key": "secon"}, 401),
        ({"Authorization": "Bearer second"}, 200),
        ({"authorization": "bearer first"}, 200),
        ({"x-api-key": "second"}, 200),
    ],
)
def test_a_key_is_asked_for(headers, status):
    app = app_of(FakeEngine(), api_keys=("first", "second"))
    response = ask(app, CHAT, {"messages": QUESTION}, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "path",
    [
        *("/generate", "/abort", "/flush_cache", "/tokenize", "/v1/messages", "/v1/models", "/stats"),
        *("/metrics", "/openapi.json", "/health/", "/nothing"),
    ],
)
def test_everything_else_is_guarded(path):
    for body in (None, {}):
        assert ask(app_of(FakeEngine(), api_keys=("k",)), path, body).status_code == 401


def test_only_health_and_the_page_are_open():
    app = app_of(FakeEngine(), api_keys=("k",))
    assert {ask(app, path).status_code for path in ("/health", "/", "/app.js", "/style.css")} == {200}


async def in_pieces():
    for _ in range(20):
        yield b"x" * 100


@pytest.mark.parametrize("content", [b"x" * 2000, "in pieces"])
def test_a_body_over_the_limit_is_refused(content):
    app = app_of(FakeEngine(), max_body_bytes=1000)
    response = ask(app, CHAT, content=in_pieces() if content == "in pieces" else content)
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]
    assert ask(app, "/v1/messages", content=b"x" * 2000).json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"", "required"),
        (b"[1, 2]", "the body"),
        (b"null", "the body"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b"\xff\xff", "body"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "UTF-8"),
        (b'{"messages": ' + b"[" * 100_000, "body"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "recursion"),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', "temperature"),
        (b'{"seed": 1' + b"0" * 5000 + b', "messages": []}', "body"),
        (b'{"seed": 1e400, "messages": []}', "seed"),
    ],
)
def test_bytes_that_are_no_request_are_refused_in_one_line(content, words):
    response = ask(FakeEngine(), CHAT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert words in message
    assert "\n" not in message
    assert len(message) <= 600


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/generate"])
def test_a_list_of_wrong_elements_is_refused_at_the_first(path):
    """A report on each of them would take the server's time and memory."""
    wrong = [1.5] * 200_000
    started = time.process_time()
    response = ask(FakeEngine(), path, {"prompt": wrong, "messages": wrong, "input_ids": wrong})
    assert time.process_time() - started < 2
    assert response.status_code == 400
    assert len(response.content) < 1000


def test_a_stalled_upload_is_given_up_and_the_connection_closed():
    with live_server(app_of(FakeEngine(), upload_seconds=0.3)) as base:
        stalled = half_a_request(base)
        assert httpx.get(f"{base}/health").status_code == 200
        answer = everything(stalled)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.3 seconds" in answer


def test_an_upload_that_goes_on_too_slowly_is_stalled_too():
    """Each piece in time, and never a whole body."""
    with live_server(app_of(FakeEngine(), upload_seconds=0.3)) as base:
        slow = half_a_request(base)
        for _ in range(5):
            time.sleep(0.1)
            with suppress(OSError):
                slow.sendall(b" ")
        assert everything(slow).startswith(b"HTTP/1.1 408")


def test_another_content_type_is_told_what_to_send():
    response = ask(FakeEngine(), CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_escaped_pairs_of_surrogates_are_characters():
    engine = FakeEngine()
    content = json.dumps({"messages": [{"role": "user", "content": "🙂"}]}).encode()
    assert b"\\ud83d" in content
    assert ask(engine, CHAT, content=content, headers={"Content-Type": "application/json"}).is_success
    assert "🙂" in engine.submitted[0].prompt_text


def test_clients_that_disconnect_abort_their_requests():
    """P63: before the first token or in mid-stream, streamed or not, with several choices or one."""
    engine = FakeEngine("</think>" + "a b " * 1000, delay=0.01)
    bodies = [
        (CHAT, {"messages": QUESTION, "stream": True}),
        (CHAT, {"messages": QUESTION, "n": 3, "stream": True}),
        (CHAT, {"messages": QUESTION}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 900, "stream": True}),
        ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 900}),
        ("/generate", {"text": "x", "stream": True}),
    ]
    app = app_of(engine)
    with live_server(app) as base:
        for path, body in bodies:
            engine.aborted.clear()
            content = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                if body.get("stream"):
                    assert b"data:" in connection.recv(100_000) + connection.recv(100_000)
                expected = body.get("n", len(body.get("prompt", "x")))
                wait_until(lambda count=expected: len(engine.running) == count)
            wait_until(lambda: not engine.running)
            assert len(engine.aborted) == expected
            wait_until(lambda: not app.state.service.running)


def test_a_client_that_stops_reading_is_given_up():
    """Its request is aborted, and what it was not sent is never made."""
    engine = FakeEngine("</think>" + "word " * 20_000, max_context=1 << 20)
    with live_server(app_of(engine, stall_seconds=0.3)) as base:
        content = json.dumps(
            {"messages": QUESTION, "stream": True, "logprobs": True, "top_logprobs": 20}
        ).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with connection:
            connection.connect(("127.0.0.1", int(base.rpartition(":")[2])))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_until(lambda: engine.aborted)
            assert engine.generated < 20_000
            assert httpx.get(f"{base}/health").status_code == 200


def test_an_answer_that_cannot_be_sent_raises_client_gone_in_the_application():
    """The application learns of it where it sends, so that its own clean-up runs."""
    seen = []

    async def application(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        except ClientGone:
            seen.append("gone")
            raise

    async def receive():
        if not seen:
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def never(message):
        await asyncio.Event().wait()

    asyncio.run(WatchedConnection(application, stall_seconds=0.01)({"type": "http"}, receive, never))
    assert seen == ["gone"]


def test_pages_of_allowed_origins_may_call():
    app = app_of(FakeEngine(), cors=("https://a.example",), api_keys=("k",))
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert ask(app, CHAT, method="OPTIONS", headers=asked).headers["access-control-allow-origin"]
    asked["Origin"] = "https://b.example"
    assert "access-control-allow-origin" not in ask(app, CHAT, method="OPTIONS", headers=asked).headers
