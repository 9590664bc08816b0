"""docs/serving.md: its requests and its Python are answered by the true application."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from megaspan.server.app import create_app
from megaspan.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import live_server

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
DOCUMENTED = "http://127.0.0.1:8000"
PYTHON = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
CURL = re.findall(rf"^curl .*?{DOCUMENTED}(\S+) .*? -d '(.*?)'$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live_server(create_app(FakeEngine(), ServerOptions(model_name="span-code"))) as address:
        yield address


def test_the_guide_has_what_is_tested_here() -> None:
    assert [("OpenAI" in block, "anthropic" in block) for block in PYTHON] == [(True, False), (False, True)]
    paths = [path for path, _ in CURL]
    assert paths == ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate"]


@pytest.mark.parametrize(("path", "body"), CURL, ids=[path for path, _ in CURL])
def test_the_requests_with_curl_are_answered(address: str, path: str, body: str) -> None:
    response = httpx.post(address + path, json=json.loads(body))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("block", PYTHON, ids=["openai", "anthropic"])
def test_the_python_runs(address: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.replace(DOCUMENTED, address), "serving.md", "exec"), {})
    assert "Hello there" in capsys.readouterr().out


def test_every_metric_of_the_guide_is_exported(address: str) -> None:
    exported = httpx.get(f"{address}/metrics").text
    named = set(re.findall(r"megaspan:\w+", GUIDE))
    assert len(named) > 8
    assert {name for name in named if name not in exported} == set()
