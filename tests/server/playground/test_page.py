"""The playground but for its chat: completion, settings, errors, meter, live panel, layout."""

import re

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from megaspan.server.app import PLAYGROUND, create_app
from megaspan.server.options import ServerOptions
from tests.server.fake_engine import encode_reply
from tests.server.live_server import live_server
from tests.server.playground.browser import PlayedEngine, opened, say, wait_for_abort, wait_for_end


def test_completion_goes_on_in_place_and_can_be_undone(page: Page, engine: PlayedEngine) -> None:
    page.get_by_role("tab", name="Chat").press("ArrowRight")
    expect(page.get_by_role("tab", name="Completion")).to_be_focused()
    text = page.get_by_label("Text to continue")
    text.fill("def f():\n    ")
    engine.play("pass\n")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#completion-note")).to_contain_text("tokens")
    expect(text).to_have_value("def f():\n    pass\n")
    expect(page.locator("mark")).to_have_text("pass\n")
    assert engine.submitted[0].prompt_text == "def f():\n    "

    engine.play("return 1\n")
    page.get_by_role("button", name="Another").click()
    expect(text).to_have_value("def f():\n    return 1\n")
    page.get_by_role("button", name="Undo").click()
    expect(text).to_have_value("def f():\n    ")

    engine.play("so far " * 400, delay=0.02)
    text.press("Control+Enter")
    expect(text).to_have_value(re.compile("so far so far"))
    page.keyboard.press("Escape")
    wait_for_abort(page, engine)
    expect(page.locator("#completion-note")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_completion_without_a_limit_may_fill_the_context(page: Page, engine: PlayedEngine) -> None:
    """OpenAI's own limit for this endpoint, where none is given, is 16 tokens."""
    page.get_by_label("Max tokens").fill("")
    page.get_by_role("tab", name="Completion").click()
    page.get_by_label("Text to continue").fill("a")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#completion-note")).to_contain_text("tokens")
    assert engine.submitted[0].params.max_tokens == 2048 - 1


def test_settings_are_sent_and_stay_in_the_session_only(page: Page, engine: PlayedEngine) -> None:
    for label, value in {"Temperature": "0.25", "Top p": "0.5", "Max tokens": "33", "Seed": "7"}.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Stop strings").fill("\\n\\n\nEND")
    page.get_by_label("Reasoning effort").select_option("none")
    page.get_by_label("System prompt").fill("Be brief.")
    engine.play("Hello.")
    say(page, "Hi")
    expect(page.get_by_label("Reply")).to_contain_text("Hello.")
    params = engine.submitted[0].params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.25, 0.5, 33, 7)
    assert params.stop == ("\n\n", "END")
    prompt = engine.submitted[0].prompt_text
    assert "Be brief." in prompt
    assert "Reasoning effort" not in prompt
    page.reload()
    expect(page.get_by_label("Seed")).to_have_value("7")
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_a_value_out_of_range_is_refused_before_it_is_sent(page: Page, engine: PlayedEngine) -> None:
    page.get_by_label("Temperature").fill("9")
    say(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text("Temperature")
    assert engine.submitted == []


def test_a_missing_key_is_one_line_and_the_right_one_mends_it(
    context: BrowserContext, engine: PlayedEngine
) -> None:
    engine.reset()
    app = create_app(engine, ServerOptions(model_name="span-code", api_keys=("right",)))
    with live_server(app) as address, opened(context, address) as page:
        say(page, "Hi")
        expect(page.get_by_role("alert")).to_contain_text("401: missing or wrong API key")
        page.get_by_label("API key").fill("right")
        page.get_by_label("API key").press("Tab")
        expect(page.get_by_role("alert")).to_be_hidden()
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_label("Reply")).to_contain_text("Hello.")


def test_the_meter_counts_what_is_written_and_shows_the_usage(page: Page, engine: PlayedEngine) -> None:
    text = "a sum of numbers " * 20
    written = len(encode_reply(text))
    page.get_by_label("Message").fill(text)
    expect(page.locator("#meter-text")).to_have_text(f"{written} of 2,048 tokens")
    page.keyboard.press("Enter")
    wait_for_end(page)
    prompt = len(engine.submitted[0].prompt)
    total = prompt + len(encode_reply("</think>\nHello.")) + 1  # the end's own token
    cached = prompt // 64 * 64
    expect(page.locator("#meter-text")).to_have_text(f"{total} of 2,048 tokens, {cached} cached")
    expect(page.get_by_role("meter", name="Context used")).to_have_attribute("aria-valuenow", str(total))
    expect(page.get_by_label("Reply").locator(".note")).to_contain_text("% of the prompt cached")
    page.get_by_label("Message").fill(text)
    expect(page.locator("#meter-text")).to_have_text(f"{total + written} of 2,048 tokens")
    page.get_by_role("tab", name="Completion").click()
    expect(page.locator("#meter-text")).to_have_text("0 of 2,048 tokens")


@pytest.mark.parametrize("mode", ["Chat", "Completion"])
def test_the_meter_moves_while_a_reply_streams(page: Page, engine: PlayedEngine, mode: str) -> None:
    engine.play("</think>so far " * 200, delay=0.02)
    page.get_by_role("tab", name=mode).click()
    page.get_by_label({"Chat": "Message", "Completion": "Text to continue"}[mode]).fill("a sum of numbers")
    written = len(encode_reply("a sum of numbers"))
    expect(page.locator("#meter-text")).to_have_text(f"{written} of 2,048 tokens")
    page.get_by_role("button", name={"Chat": "Send", "Completion": "Continue"}[mode]).click()
    seen = [written]
    while len(seen) < 4:
        expect(page.locator("#meter-text")).not_to_have_text(f"{seen[-1]:,} of 2,048 tokens")
        now = page.get_by_role("meter", name="Context used").get_attribute("aria-valuenow")
        seen.append(int(now or 0))
    assert seen == sorted(seen)
    page.keyboard.press("Escape")
    wait_for_abort(page, engine)


def test_the_panel_follows_the_engine(page: Page, engine: PlayedEngine) -> None:
    expect(page.locator("#running")).to_have_text("0")
    say(page, "Hi")  # the time to the first token is the server's own
    wait_for_end(page)
    asked = engine.prompt_tokens
    engine.figures = {"running": 5, "waiting": 2, "tokens_per_second": 1234.5, "host_pages_total": 4000}
    engine.figures |= {"prefix_queries_total": asked + 10_000, "prefix_hits_total": asked // 2 + 9_000}
    engine.figures |= {"pages_total": 100, "pages_free": 30, "pages_cached": 50, "host_pages_used": 1000}
    for name, text in {"running": "5", "waiting": "2", "speed": "1,235", "hits": "90 %"}.items():
        expect(page.locator(f"#{name}")).to_have_text(text)
    expect(page.locator("#first")).to_have_text(re.compile(r"^\d+(\.\d+)? m?s$"))
    expect(page.locator("#device-text")).to_have_text("70 of 100")
    expect(page.get_by_role("meter", name="Device pages in use")).to_have_attribute("aria-valuenow", "20")
    expect(page.locator("#host-text")).to_have_text("1,000 of 4,000")
    expect(page.locator("#speed-line .line")).to_have_attribute("d", re.compile("L.*,2.0$"))  # at the top


def overflowing(page: Page) -> list[str]:
    """Parts of the page whose content is wider than they are. Code may be: its box scrolls."""
    return page.evaluate(
        """() => ["html", "main", "#messages", "#messages .prose", "#side", "#settings"]
            .filter((name) => [...document.querySelectorAll(name)].some(
                (it) => it.scrollWidth > it.clientWidth))"""
    )


@pytest.mark.parametrize("width", [380, 1280])
def test_nothing_is_wider_than_the_window(page: Page, engine: PlayedEngine, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    engine.play("</think>\n" + "x" * 300 + "\n```\n" + "y" * 300 + "\n```\n")
    say(page, "word" * 60)
    wait_for_end(page)
    assert overflowing(page) == []
    if width < 900:
        toggle = page.get_by_role("button", name="Panel")
        expect(page.locator("#settings")).to_be_hidden()
        toggle.press("Enter")
        expect(toggle).to_have_attribute("aria-expanded", "true")
        expect(page.locator("#draft")).to_be_hidden()
    expect(page.locator("#settings")).to_be_visible()
    assert overflowing(page) == []


def test_the_page_has_no_inline_code_and_names_every_control(page: Page) -> None:
    html = (PLAYGROUND / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src=)|https?:", html)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")]
            .filter((it) => !it.labels?.length && !it.textContent.trim() && !it.ariaLabel)
            .map((it) => it.outerHTML)"""
    )
    assert nameless == []
