"""A headless Chromium on the true application with an engine that plays scripts. A browser for each file."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from megaspan.server.app import create_app
from megaspan.server.options import ServerOptions
from tests.server.live_server import live_server
from tests.server.playground.browser import CHROMIUM, FLAGS, PlayedEngine, opened


@pytest.fixture(scope="module")
def engine() -> PlayedEngine:
    return PlayedEngine()


@pytest.fixture(scope="module")
def address(engine: PlayedEngine) -> Iterator[str]:
    with live_server(create_app(engine, ServerOptions(model_name="span-code"))) as address:
        yield address


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    if CHROMIUM is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome on PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser.new_context(viewport={"width": 1280, "height": 800})
        browser.close()


@pytest.fixture
def page(context: BrowserContext, engine: PlayedEngine, address: str) -> Iterator[Page]:
    engine.reset()
    with opened(context, address) as page:
        expect(page.locator("#model")).to_have_text("span-code")
        yield page
