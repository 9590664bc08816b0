"""Starting and ending: a taken port, SIGTERM in the middle of a stream."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from megaspan.errors import UserError
from megaspan.server.app import create_app
from megaspan.server.options import ServerOptions
from megaspan.server.serve import bind, make_server, run
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import everything, half_a_request, wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = """
from megaspan.server.options import ServerOptions
from megaspan.server.serve import run
from tests.server.fake_engine import FakeEngine
engine = FakeEngine("</think>" + "a b " * 20, delay=0.02)
run(engine, ServerOptions(model_name="span-code", port=0, drain_seconds=20))
print("stopped", engine.stopped, len(engine.aborted), flush=True)
"""


def stream(base, into):
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=30) as response:
        into += response.iter_lines()


def test_sigterm_lets_a_running_request_finish_and_turns_new_ones_away():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        base = process.stdout.readline().split()[-1]
        lines: list[str] = []
        reader = threading.Thread(target=stream, args=(base, lines))
        reader.start()
        wait_until(lambda: len(lines) > 5)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{base}/health").status_code == 503)
        assert httpx.post(f"{base}/v1/completions", json={"prompt": "x"}).status_code == 503
        reader.join(20)
        assert process.wait(20) == 0
        assert process.stdout.read().split() == ["stopped", "True", "0"]
    finally:
        process.kill()
    assert lines[-2] == "data: [DONE]"
    assert '"finish_reason":"stop"' in "".join(lines)


BUSY = """
from megaspan.server.options import ServerOptions
from megaspan.server.serve import run
from tests.server.fake_engine import FakeEngine
engine = FakeEngine(max_context=1 << 25)
encode_batch = engine.tokenizer.encode_batch
def told(texts):
    print("encoding", len(texts[0]), flush=True)
    return encode_batch(texts)
engine.tokenizer.encode_batch = told
run(engine, ServerOptions(model_name="span-code", port=0, drain_seconds=0.5))
"""


def test_sigterm_ends_what_is_uploaded_and_encoded_soon_and_quietly():
    """A text whose encoding would take half a minute, and a body of which only the half came."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, env=environment, **pipes)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        told = process.stdout
        base = told.readline().split()[-1]
        uploading = half_a_request(base)
        answers: list[httpx.Response] = []
        body = {"prompt": "x = a[0] + b.c\n" * 2_000_000}

        def encode() -> None:
            answers.append(httpx.post(f"{base}/v1/completions", json=body, timeout=30))

        encoding = threading.Thread(target=encode)
        encoding.start()
        wait_until(lambda: int(told.readline().split()[-1]) > 10_000)
        process.send_signal(signal.SIGTERM)
        before = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - before < 5
        encoding.join(10)
        assert everything(uploading).startswith(b"HTTP/1.1 503")
        assert [answer.status_code for answer in answers] == [503]
        assert process.stderr.read() == ""
    finally:
        process.kill()


@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_finish_in_time_is_aborted(signals):
    """In time: within drain_seconds, or until the second signal."""
    engine = FakeEngine("</think>" + "a b " * 500, delay=0.02)
    options = ServerOptions(model_name="x", port=0, drain_seconds=0.1 if signals == 1 else 60)
    server = make_server(create_app(engine, options))
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    lines: list[str] = []
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    reader = threading.Thread(target=stream, args=(base, lines))
    reader.start()
    wait_until(lambda: len(lines) > 5)
    for _ in range(signals):
        server.handle_exit(signal.SIGTERM, None)
    thread.join(20)
    reader.join(20)
    listener.close()
    assert not thread.is_alive()
    assert engine.stopped
    assert len(engine.aborted) == 1
    assert '"finish_reason":"abort"' in "".join(lines)


def test_a_taken_port_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*--port") as caught:
            run(FakeEngine(), ServerOptions(model_name="x", port=port))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_that_is_not_this_machine_is_one_clear_line(host):
    with pytest.raises(UserError, match="--host"):
        bind(host, 0)


@pytest.mark.parametrize(
    "field",
    [
        {"model_name": " "},
        {"port": 70000},
        {"max_body_bytes": 0},
        {"max_choices": 0},
        {"upload_seconds": 0},
        {"drain_seconds": -1},
        {"drain_seconds": float("nan")},
        {"stall_seconds": 0},
        {"api_keys": ("",)},
        {"api_keys": ("schlüssel",)},
    ],
)
def test_options_are_checked(field):
    with pytest.raises(UserError) as caught:
        ServerOptions(**{"model_name": "x", **field})
    assert "\n" not in str(caught.value)


def test_a_model_without_a_tokenizer_cannot_be_served(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(engine, "tokenizer", None)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        run(engine, ServerOptions(model_name="x", port=0))


def test_answers_are_not_held_back_by_nagles_delay():
    """asyncio turns it off only for sockets that name their protocol, which those accepted here inherit."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
