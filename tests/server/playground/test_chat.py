"""The playground's chat."""

import re

from playwright.sync_api import Page, expect

from tests.server.playground.browser import PlayedEngine, say, wait_for_abort, wait_for_end

FENCED = "Use `x`:\n\n```python\nif a < b:\n    print('``')\n```\n~~~\nplain\n~~~\nDone ``` here."


def test_chat_shows_reasoning_then_text_and_keeps_the_turns(page: Page, engine: PlayedEngine) -> None:
    engine.play("Hm, yes.</think>\nTwo words.")
    say(page, "Say two words")
    wait_for_end(page)
    reply = page.get_by_label("Reply")
    expect(reply.locator("> .prose")).to_have_text("Two words.")
    expect(reply.locator(".reasoning .prose")).to_be_hidden()
    reply.locator("summary").click()
    expect(reply.locator(".reasoning .prose")).to_have_text("Hm, yes.")
    expect(reply.locator(".note")).to_have_text(re.compile(r"^\d+ tokens · .* tokens/s · first after "))

    say(page, "Once more")
    expect(page.get_by_label("Reply")).to_have_count(2)
    wait_for_end(page)
    asked = engine.submitted[1].prompt_text
    assert asked.index("Say two words") < asked.index("Two words.") < asked.index("Once more")


def test_a_reply_that_only_reasoned_stays_open_and_offers_the_way_out(
    page: Page, engine: PlayedEngine
) -> None:
    engine.play("Hm, let me see. " * 40)
    page.get_by_label("Max tokens").fill("20")
    for count in (1, 2):
        say(page, "Say two words")
        expect(page.get_by_label("Reply")).to_have_count(count)
        wait_for_end(page)
        expect(page.get_by_label("Reply").last.locator(".reasoning .prose")).to_be_visible()
        expect(page.locator(".offer")).to_have_count(1)
    engine.play("Two words.")
    page.get_by_role("button", name="Answer without reasoning").click()
    expect(page.get_by_label("Reply").last.locator("> .prose")).to_have_text("Two words.")
    expect(page.get_by_label("Reply")).to_have_count(2)
    expect(page.get_by_label("Reasoning effort")).to_have_value("none")
    expect(page.locator(".offer")).to_have_count(0)
    assert not engine.submitted[-1].prompt_text.rstrip().endswith("<think>")


def test_a_stopped_reasoning_offers_nothing(page: Page, engine: PlayedEngine) -> None:
    engine.play("Hm, so far " * 400, delay=0.02)
    say(page, "Go on")
    expect(page.get_by_label("Reply")).to_contain_text("so far")
    page.keyboard.press("Escape")
    wait_for_end(page)
    expect(page.locator(".offer")).to_have_count(0)


def test_stop_aborts_the_request_and_keeps_what_came(page: Page, engine: PlayedEngine) -> None:
    engine.play("</think>\n" + "so far " * 400, delay=0.02)
    say(page, "Go on")
    expect(page.get_by_label("Reply")).to_contain_text("so far so far")
    assert engine.aborted == []
    page.get_by_role("button", name="Stop").click()
    wait_for_abort(page, engine)
    expect(page.get_by_label("Reply").locator(".note")).to_contain_text("stopped")
    expect(page.get_by_label("Reply")).to_contain_text("so far")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_clear_while_a_reply_streams_leaves_nothing_behind(page: Page, engine: PlayedEngine) -> None:
    engine.play("</think>\n" + "so far " * 400, delay=0.02)
    say(page, "Forgotten")
    expect(page.get_by_label("Reply")).to_contain_text("so far")
    page.get_by_role("button", name="Clear").click()
    wait_for_abort(page, engine)
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("#meter-text")).to_have_text("0 of 2,048 tokens")
    engine.play("</think>\nFresh.")
    say(page, "New")
    expect(page.get_by_label("Reply")).to_contain_text("Fresh.")
    assert "Forgotten" not in engine.submitted[-1].prompt_text


def test_regenerate_replaces_the_last_reply(page: Page, engine: PlayedEngine) -> None:
    say(page, "Hi")
    expect(page.get_by_label("Reply")).to_contain_text("Hello.")
    wait_for_end(page)
    engine.play("</think>\nGood day.")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_label("Reply")).to_contain_text("Good day.")
    expect(page.get_by_label("Reply")).to_have_count(1)
    first, second = engine.submitted
    assert first.prompt == second.prompt


def test_a_stopped_second_try_is_counted_anew(page: Page, engine: PlayedEngine) -> None:
    engine.play("</think>\n" + "a long reply " * 30)
    say(page, "Hi")
    wait_for_end(page)
    meter = page.get_by_role("meter", name="Context used")
    before = int(meter.get_attribute("aria-valuenow") or 0)
    engine.play("</think>\nIt goes " + "on " * 400, delay=0.05)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_label("Reply")).to_contain_text("It goes")
    page.keyboard.press("Escape")
    wait_for_abort(page, engine)
    expect(meter).not_to_have_attribute("aria-valuenow", str(before))
    assert 0 < int(meter.get_attribute("aria-valuenow") or 0) < before


def test_a_tool_call_is_shown_and_its_result_goes_back(page: Page, engine: PlayedEngine) -> None:
    arguments = "".join(
        f"<arg_key>{name}</arg_key><arg_value>{value}</arg_value>" for name, value in {"a": 1, "b": 2}.items()
    )
    engine.play(f"</think>\nI add.<tool_call>add{arguments}</tool_call>")
    number = '{"type": "integer"}'
    properties = f'{{"type": "object", "properties": {{"a": {number}, "b": {number}}}}}'
    page.get_by_label("Tools").fill(f'{{"name": "add", "parameters": {properties}}}')
    say(page, "Add 1 and 2")
    wait_for_end(page)
    expect(page.locator(".tool strong")).to_have_text("add")
    expect(page.locator(".tool pre")).to_have_text(re.compile(r'^\{"a": ?1, ?"b": ?2\}$'))

    engine.play("</think>\nThree.")
    page.get_by_label("Result of add").fill("the sum is 3")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Reply").last).to_contain_text("Three.")
    asked = engine.submitted[1].prompt_text
    assert asked.index("<tool_call>add\n") < asked.index("the sum is 3")


def test_fenced_code_gets_a_box_and_can_be_copied(page: Page, engine: PlayedEngine) -> None:
    engine.play(f"</think>\n{FENCED}")
    say(page, "Code, please")
    wait_for_end(page)
    assert page.locator(".code pre").all_text_contents() == ["if a < b:\n    print('``')\n", "plain\n"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").first.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('``')\n"


def test_fences_are_found_however_the_text_is_split(page: Page) -> None:
    splits = [[FENCED[i : i + size] for i in range(0, len(FENCED), size)] for size in (1, 2, 3, 7, 1000)]
    shown = page.evaluate(
        """async (splits) => {
            const { FencedText } = await import("./fenced.js");
            return splits.map((pieces) => {
                const box = document.createElement("div");
                const text = new FencedText(box);
                for (const piece of pieces) text.append(piece);
                text.finish();
                return [...box.children].map((part) => (part.querySelector("pre") ?? part).textContent);
            });
        }""",
        splits,
    )
    assert shown == [["Use `x`:", "if a < b:\n    print('``')\n", "plain\n", "Done ``` here."]] * len(splits)


def test_markup_in_text_stays_text(page: Page, engine: PlayedEngine) -> None:
    markup = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    engine.play(f"{markup}</think>\n{markup}\n```{markup}\n{markup}\n```\n")
    say(page, markup)
    wait_for_end(page)
    assert page.locator(".user").text_content() == markup
    assert page.locator(".reasoning .prose").text_content() == markup
    assert page.locator("#messages img, #messages script").count() == 0
    assert page.title() == "megaspan"


def test_an_error_in_mid_stream_is_shown_and_what_came_is_kept(page: Page, engine: PlayedEngine) -> None:
    engine.play("</think>\nSo far, so good")
    engine.failing, engine.burst = "internal", 4
    say(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text("a row of logits holds no numbers")
    expect(page.get_by_label("Reply")).to_contain_text("So")
    expect(page.get_by_label("Reply").locator(".note")).to_have_text("failed")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
