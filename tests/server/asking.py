"""Requests to an application in this process, and what comes back taken apart."""

import asyncio
import json
from typing import Any

import httpx

from megaspan.server.app import create_app
from megaspan.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine

MODEL = "span-code"
QUESTION: list[Any] = [{"role": "user", "content": "hi"}]


def app_of(engine: FakeEngine, **options: Any):
    return create_app(engine, ServerOptions(**{"model_name": MODEL, **options}))


def ask(target: Any, path: str, body: Any = None, *, method: str = "", **request: Any) -> httpx.Response:
    """One request to an engine's application, or to an application. No body: a GET."""
    app = app_of(target) if isinstance(target, FakeEngine) else target

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            if body is not None:
                request["json"] = body
            verb = method or ("GET" if not {"json", "content"} & request.keys() else "POST")
            return await client.request(verb, path, **request)

    return asyncio.run(send())


def events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; names and framing are checked on the way."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        *names, data = block.split("\n")
        assert data.startswith("data: ")
        content = data.removeprefix("data: ")
        found.append(content if content == "[DONE]" else json.loads(content))
        assert names in ([], [f"event: {found[-1].get('type')}" if found[-1] != "[DONE]" else ""])
    return found
