"""docs/serving.md: its requests and its Python are answered by the true application."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main

from megaspan.cli import app
from megaspan.server.app import create_app
from megaspan.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import live_server

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
DOCUMENTED = "http://127.0.0.1:8000"
PYTHON = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
ANSWERS = re.findall(r"^```json\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
CURL = re.findall(rf"^curl .*?{DOCUMENTED}(\S+) .*? -d '(.*?)'$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live_server(create_app(FakeEngine(), ServerOptions(model_name="span-code"))) as address:
        yield address


def test_the_guide_has_what_is_tested_here() -> None:
    for word, block in zip(("import OpenAI", "import anthropic", "import Engine"), PYTHON, strict=True):
        assert word in block
    paths = [path for path, _ in CURL]
    assert paths == ["/v1/completions", "/generate", "/v1/chat/completions", "/v1/messages"]
    assert len(ANSWERS) == 2


@pytest.mark.parametrize(("path", "body"), CURL, ids=[path for path, _ in CURL])
def test_the_requests_with_curl_are_answered(address: str, path: str, body: str) -> None:
    response = httpx.post(address + path, json=json.loads(body))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("number", range(2))
def test_the_answers_shown_are_of_the_shape_that_comes(address: str, number: int) -> None:
    path, body = CURL[number]
    came = httpx.post(address + path, json=json.loads(body)).json()
    assert shape(json.loads(ANSWERS[number])) == shape(came)


def shape(value: Any) -> Any:
    """The names in a JSON object, at every level; of a list, those in its first entry."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items() if name != "stop_reason"}
    return shape(value[0]) if isinstance(value, list) and value else None


@pytest.mark.parametrize("block", PYTHON[:2], ids=["openai", "anthropic"])
def test_the_clients_python_runs(address: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.replace(DOCUMENTED, address), "serving.md", "exec"), {})
    assert "Hello there" in capsys.readouterr().out


def test_the_engines_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(PYTHON[2], "serving.md", "exec"), {})
    *_, last = lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4  # two completions, and a stream of four tokens
    assert last.endswith("length")


def test_every_option_of_serve_is_explained() -> None:
    command = typer.main.get_command(app).commands["serve"]  # pyright: ignore[reportAttributeAccessIssue]
    options = {parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--")}
    table = GUIDE[GUIDE.index("## Tuning") :]
    explained = re.findall(r"`(--[a-z-]+)`", " ".join(re.findall(r"^\| `--.*? \|", table, re.MULTILINE)))
    assert sorted(explained) == sorted(options)


def test_every_metric_of_the_guide_is_exported(address: str) -> None:
    exported = httpx.get(f"{address}/metrics").text
    named = set(re.findall(r"megaspan:\w+", GUIDE))
    assert len(named) > 8
    assert {name for name in named if name not in exported} == set()
