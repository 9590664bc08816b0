"""What the playground's tests share: the browser, an engine that can be set anew, and usual steps."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from playwright.sync_api import BrowserContext, Page, expect

from megaspan.engine.stats import EngineStats
from tests.server.fake_engine import FakeEngine

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
expect.set_options(timeout=10_000)


class PlayedEngine(FakeEngine):
    """A fake engine that tests can set anew, and whose figures they can set."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, Any] = {}

    def play(self, script: str, *, delay: float = 0.0) -> None:
        self.script, self.delay = script, delay

    def reset(self) -> None:
        self.play("</think>\nHello.")
        self.submitted.clear()
        self.aborted.clear()
        self.figures.clear()
        self.failing, self.burst = None, 1

    def stats(self) -> EngineStats:
        return replace(super().stats(), **self.figures)


@contextmanager
def opened(context: BrowserContext, address: str) -> Iterator[Page]:
    """The page. It must ask nothing of other hosts and complain of nothing but answers that are errors."""
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    yield page
    page.close()
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
    assert [url for url in asked if not url.startswith(f"{address}/")] == []


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def wait_for_end(page: Page) -> None:
    """A reply has its note once it has ended."""
    expect(page.get_by_label("Reply").last.locator(".note")).to_be_visible()


def wait_for_abort(page: Page, engine: PlayedEngine) -> None:
    for _ in range(200):
        if engine.aborted:
            return
        page.wait_for_timeout(20)
    raise AssertionError("the engine was not told")
