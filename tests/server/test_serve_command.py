"""`megaspan serve`: bad options are one line, a key is asked for, SIGTERM lets a stream finish."""

import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from megaspan.cli import app
from megaspan.server import serve
from tests.server.asking import MODEL
from tests.server.live_server import wait_until
from tests.server.serve_process import Server, serve_process
from tests.server.small_model import write_small_model

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("served"))


def refused(*arguments: object) -> str:
    """The one line with which the command declines to start."""
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("megaspan: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "cuda:99"), "use cpu"),
        (("--device", "abacus"), "no device 'abacus' here: use cpu (not one of PyTorch's)\n"),
        (("--dtype", "float16"), "bfloat16"),
        (("--latent-rows", "fp4"), "--latent-rows must be"),
        (("--index-rows", "int8"), "--index-rows must be"),
        (("--cache-gib", 0.000001), "--cache-gib is"),
        (("--cache-gib", -1), "--cache-gib must be"),
        (("--cache-gib", 1e9), "--cache-gib asks"),
        (("--host-gib", 1e9), "--host-gib asks"),
        (("--cache-gib", "nan"), "--cache-gib must be"),
        (("--host-gib", -1), "--host-gib must be"),
        (("--disk-folder", "pages"), "set --host-gib"),
        (("--write-policy", "sometimes"), "--write-policy must be"),
        (("--max-running", 0), "--max-running must be at least 1"),
        (("--max-running", 10**9), "--max-running must be at most"),
        (("--max-waiting", 0), "--max-waiting"),
        (("--max-context", 0), "--max-context must be at least 2, not 0"),
        (("--max-context", 1), "--max-context must be at least 2, not 1"),
        (("--step-seconds", 0), "--step-seconds must be"),
        (("--drain-seconds", -1), "--drain-seconds is"),
        (("--api-key", ""), "API key"),
        (("--api-key", "two words "), "API key"),
        (("--name", " "), "the model's name is empty"),
        (("--port", 65536), "port"),
        (("--port", "http"), "--port"),
        (("--host", "no such host"), "--host"),
        (("--threads", 0), "threads"),
        (("--what",), "--what"),
    ],
)
def test_options_that_are_refused(folder, monkeypatch, options, message):
    monkeypatch.setattr(serve, "run", lambda *_: pytest.fail("it started"))
    assert message in refused(folder, "--port", 0, *options)


def test_folders_that_cannot_be_served(folder, tmp_path):
    assert "is not a folder" in refused(tmp_path / "absent", "--port", 0)
    assert "config.json" in refused(tmp_path, "--port", 0)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert "safetensors" in refused(tmp_path, "--port", 0)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert "tokenizer.json" in refused(tmp_path, "--port", 0)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "disk tier" in refused(folder, "--port", 0, "--host-gib", 0.01, "--disk-folder", blocked)


def test_a_taken_port_is_told_before_the_model_is_read(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(tmp_path / "absent", "--port", port)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("log") / "serve.log"
    options = ("--api-key", KEY, "--api-key", "another", "--max-context", 1000, "--drain-seconds", 30)
    with serve_process(folder, log, *options) as server:
        yield server


def test_the_command_serves_under_the_folders_name_with_a_key(server: Server):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="another", max_retries=0) as client:
        assert [(model.id, getattr(model, "max_model_len", 0)) for model in client.models.list()] == [
            (MODEL, 1000)
        ]
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=3).usage
    for path in ("/v1/models", "/v1/messages", "/generate", "/tokenize", "/abort", "/stats"):
        assert httpx.request("GET" if "models" in path else "POST", server.base + path).status_code == 401
    assert httpx.get(f"{server.base}/health").status_code == 200
    assert "<title>" in httpx.get(server.base).text


def test_metrics_count_what_was_served(server: Server):
    body = {"text": "import os", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}

    def measured(name: str) -> float:
        lines = httpx.get(f"{server.base}/metrics", headers=HEADERS).text.splitlines()
        found = [line for line in lines if line.startswith(f"megaspan:{name}{{")]
        assert len(found) == 1, name
        return float(found[0].split()[-1])

    names = (
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_sum",
    )
    before = [measured(name) for name in names]
    assert httpx.post(f"{server.base}/generate", json=body, headers=HEADERS, timeout=30).status_code == 200
    after = [measured(name) for name in names]
    assert (after[0] - before[0], after[1] - before[1]) == (5, 1)
    assert after[2] > before[2]
    assert measured("num_requests_running") == 0
    assert measured("num_pages_free") + measured("num_pages_cached") == measured("num_pages")


def test_sigterm_lets_a_stream_finish(server: Server):
    """The last test of this server."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    lines: list[Any] = []

    def read() -> None:
        request = {"json": body, "headers": HEADERS, "timeout": 60}
        with httpx.stream("POST", f"{server.base}/v1/completions", **request) as response:
            lines.extend(response.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: httpx.get(f"{server.base}/stats", headers=HEADERS).json()["running"])
    server.process.send_signal(signal.SIGTERM)
    reader.join(60)
    assert server.process.wait(20) == 0
    *_, last, _, done, _ = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.log.read_text().count("\n") == 1  # its address, and no traceback
