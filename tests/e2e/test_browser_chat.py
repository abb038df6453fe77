"""Chat in a real browser: pictures come in, answers stream, stop and start again; nothing leaves this machine."""

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from llama_adapter.app.models.resources import sample_pictures
from tests.e2e.browser import Browser, ServedPage, Visit

pytestmark = pytest.mark.slow

MOON = sample_pictures() / "01-yellow-moon-green-cross.png"
CAPTION = "a small yellow moon above a small green cross"


@pytest.fixture
def visit(browser: Browser, served: ServedPage) -> Iterator[Visit]:
    visit = Visit(browser, served)
    yield visit
    served.gate.open()
    visit.close()
    assert visit.foreign_requests() == [], "the page asked somebody else"
    assert visit.complaints == []


def upload(visit: Visit, data: bytes, *, name: str = "moon.png") -> None:
    chosen = visit.page.locator("#chat-picture input[type=file]")
    chosen.set_input_files({"name": name, "mimeType": "image/png", "buffer": data})
    expect(visit.page.locator("#chat-picture-line")).to_contain_text(name)


def ask(visit: Visit, question: str) -> None:
    visit.settle()
    visit.page.get_by_label("Question", exact=True).fill(question)
    visit.page.get_by_role("button", name="Ask", exact=True).click()


def last_answer(visit: Visit) -> Any:
    return visit.page.locator("#chat-log .la-text").last


def fresh(data: bytes, *, mark: str) -> bytes:
    """The same picture in bytes that the service has not seen."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        image.convert("RGB").save(file, "JPEG", quality=97, comment=mark.encode())
    return file.getvalue()


def noise() -> bytes:
    """A picture that the embedded model was not made for."""
    file = io.BytesIO()
    Image.effect_noise((640, 480), 80).save(file, "PNG")
    return file.getvalue()


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)


def test_an_uploaded_picture_is_asked_about_and_followed_up(visit: Visit) -> None:
    upload(visit, fresh(MOON.read_bytes(), mark="follow-up"))
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("224 × 224 pixels")
    ask(visit, "Generate caption of this image")
    expect(last_answer(visit)).to_have_text(CAPTION)
    log = visit.page.locator("#chat-log")
    for figure in ("queue", "read", "clip", "first token", "total", "tokens", "tokens/s"):
        expect(log).to_contain_text(figure)
    expect(log.get_by_text("picture encoded once")).to_have_count(0)

    visit.settle()
    visit.page.get_by_label("Question", exact=True).fill("What color is the moon?")
    visit.page.get_by_label("Question", exact=True).press("Enter")

    expect(last_answer(visit)).to_have_text("yellow")
    expect(log.get_by_text("picture encoded once")).to_have_count(1)
    expect(visit.page.get_by_label("Question", exact=True)).to_have_value("")
    expect(log.locator(".la-doubt")).to_have_count(0)
    visit.screenshot("chat")

    upload(visit, noise(), name="noise.png")
    ask(visit, "What is in the picture?")
    expect(log.locator(".la-doubt")).to_contain_text("does not look like those the model was trained on")
    visit.screenshot("chat-unfamiliar")


def test_the_answer_grows_while_it_is_written(visit: Visit) -> None:
    upload(visit, MOON.read_bytes())
    visit.served.gate.close()
    ask(visit, "Generate caption of this image")
    seen = []
    for words in ("a", "a small", "a small yellow", "a small yellow moon"):
        expect(last_answer(visit)).to_have_text(words)
        seen.append(last_answer(visit).inner_text())
        if words == "a small yellow":
            expect(visit.page.locator("#chat-log [aria-busy=true]")).to_have_count(1)
            visit.screenshot("chat-streaming")
        visit.served.gate.let(1)
    visit.served.gate.open()

    expect(last_answer(visit)).to_have_text(CAPTION)
    expect(visit.page.locator("#chat-log [aria-busy]")).to_have_count(0)
    assert len(set(seen)) == 4


def test_stop_keeps_what_was_written(visit: Visit) -> None:
    upload(visit, MOON.read_bytes())
    visit.served.gate.close()
    ask(visit, "Generate caption of this image")
    expect(last_answer(visit)).to_have_text("a")
    visit.served.gate.let(2)
    expect(last_answer(visit)).to_have_text("a small yellow")
    visit.served.service.cancelled.clear()
    visit.page.get_by_role("button", name="Stop").click()
    assert visit.served.service.cancelled.wait(60)
    visit.served.gate.open()

    expect(visit.page.locator("#chat-log")).to_contain_text("Stopped: this is what there was until then.")
    assert CAPTION.startswith(last_answer(visit).inner_text())
    assert last_answer(visit).inner_text() != CAPTION
    expect(visit.page.get_by_role("button", name="Stop")).to_be_disabled()
    visit.screenshot("chat-stopped")

    visit.settle()
    visit.page.get_by_role("button", name="Retry").click()
    expect(last_answer(visit)).to_have_text(CAPTION)
    expect(visit.page.locator("#chat-log .la-turn")).to_have_count(1)

    visit.page.get_by_role("button", name="Clear", exact=True).click()
    expect(visit.page.locator("#chat-log .la-turn")).to_have_count(0)
    expect(visit.page.locator("#chat-log")).to_contain_text("Choose a picture, then ask")


def test_closing_the_page_cancels_its_question(browser: Browser, served: ServedPage) -> None:
    visit = Visit(browser, served)
    upload(visit, MOON.read_bytes())
    served.gate.close()
    ask(visit, "Generate caption of this image")
    expect(last_answer(visit)).to_have_text("a")
    before = served.gate.num_steps
    served.service.cancelled.clear()
    visit.close()
    assert served.service.cancelled.wait(30), "nobody cancelled the question"
    served.gate.open()

    assert served.service.wait_until_idle(30)
    assert served.gate.num_steps <= before + 2, "the engine went on for nobody"


def test_a_sample_and_a_question_to_start_from_need_no_keyboard(visit: Visit) -> None:
    visit.page.locator("#chat-samples").get_by_role("button", name="Sample picture: red star", exact=True).click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("12-red-star.jpg")
    visit.page.get_by_role("button", name="Which colour?").click()
    expect(visit.page.get_by_label("Question", exact=True)).to_have_value("What color is the star?")
    visit.page.get_by_role("button", name="Ask", exact=True).click()
    expect(last_answer(visit)).to_have_text("red")

    visit.page.locator("#chat-samples").get_by_role("button", name="Sample picture: blue moon", exact=True).click()
    expect(visit.page.locator("#chat-log .la-turn")).to_have_count(0)


def test_the_keyboard_alone_is_enough(visit: Visit) -> None:
    visit.page.locator("#chat-samples button").first.focus()
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    for _ in range(60):  # samples, log, questions to start from
        visit.page.keyboard.press("Tab")
        if visit.page.evaluate("document.activeElement.tagName") == "TEXTAREA":
            break
    visit.page.keyboard.type("Where is the moon?")
    outline = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    visit.page.keyboard.press("Enter")

    expect(last_answer(visit)).to_have_text("at the top right")
    assert outline == "solid", "the focus must be visible"


def test_broken_and_missing_pictures_are_told_in_sentences(visit: Visit) -> None:
    ask(visit, "Where is the moon?")
    expect(visit.page.locator("#chat-notice [role=alert]")).to_have_text(
        "Choose a picture first, or wait until it has arrived."
    )

    upload(visit, MOON.read_bytes()[:900], name="broken <b>x.png")
    problem = visit.page.locator("#chat-picture-line [role=alert]")
    expect(problem).to_contain_text("is cut off or damaged")
    expect(problem).to_contain_text("broken <b>x.png")
    visit.page.get_by_role("button", name="Ask", exact=True).click()
    expect(visit.page.locator("#chat-log .la-problem")).to_contain_text("is cut off or damaged")
    expect(visit.page.locator("#chat-notice [role=alert]")).to_have_count(0)
    visit.screenshot("chat-problem")

    visit.page.get_by_role("button", name="Ask", exact=True).click()
    expect(visit.page.locator("#chat-notice [role=alert]")).to_contain_text("Write a question first")


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(visit: Visit) -> None:
    huge = io.BytesIO()
    Image.new("1", (9_000, 6_000)).save(huge, "PNG")
    upload(visit, huge.getvalue(), name="huge.png")

    expect(visit.page.locator("#chat-picture-line [role=alert]")).to_contain_text("Wanted at most 50,000,000 pixels")


def test_kinds_that_browsers_do_not_show_get_a_preview_and_an_answer(visit: Visit) -> None:
    scan = io.BytesIO()
    with Image.open(MOON) as image:
        image.convert("RGB").save(scan, "TIFF")
    upload(visit, scan.getvalue(), name="scan.tiff")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("scan.tiff")
    expect(visit.page.locator("#chat-picture img")).to_have_attribute("src", re.compile("preview.webp"))
    ask(visit, "Generate caption of this image")

    expect(last_answer(visit)).to_have_text(CAPTION)


def test_a_picture_is_pasted(visit: Visit) -> None:
    visit.page.evaluate(
        """async (bytes) => {
            const blob = new Blob([new Uint8Array(bytes)], {type: "image/png"});
            await navigator.clipboard.write([new ClipboardItem({"image/png": blob})]);
        }""",
        list(MOON.read_bytes()),
    )
    visit.page.get_by_label("Paste from clipboard").click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("224 × 224 pixels")
    ask(visit, "Generate caption of this image")

    expect(last_answer(visit)).to_have_text(CAPTION)


def test_a_picture_is_taken_by_the_camera(visit: Visit) -> None:
    visit.page.get_by_label("Capture from camera").click()
    visit.page.get_by_text("Click to Access Webcam").click()
    visit.page.wait_for_function("document.querySelector('#chat-picture video')?.videoWidth > 0")
    visit.page.get_by_label("capture photo").click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    ask(visit, "Generate caption of this image")

    expect(last_answer(visit)).to_contain_text("a ")


def set_most_tokens(visit: Visit, number: int) -> None:
    """Type it until it stays: controls that have just been opened may be replaced, with the value that they had."""
    field = visit.page.get_by_label("number input for Most tokens")
    slider = visit.page.get_by_label("range slider for Most tokens")
    num_seen = 0
    for _ in range(100):
        num_seen = num_seen + 1 if slider.input_value() == str(number) else 0
        if num_seen == 10:
            return
        if num_seen == 0:
            field.fill(str(number))
            field.press("Tab")
        visit.page.wait_for_timeout(100)
    raise AssertionError("the field takes no number")


def test_settings_reach_the_answer(visit: Visit) -> None:
    upload(visit, MOON.read_bytes())
    visit.page.get_by_role("button", name="Settings").click()
    set_most_tokens(visit, 2)
    ask(visit, "Generate caption of this image")
    expect(last_answer(visit)).to_have_text("a small")
    expect(visit.page.locator("#chat-log")).to_contain_text("Cut at the limit")
    visit.screenshot("chat-settings")

    visit.page.get_by_label("Seed").fill("seven")
    ask(visit, "Generate caption of this image")
    expect(visit.page.locator("#chat-notice [role=alert]")).to_contain_text("The seed must be a whole number or empty")


def test_markup_in_a_question_is_shown_and_not_run(visit: Visit) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"> ${document.title='owned'} {{value}} **x**"
    upload(visit, MOON.read_bytes())
    ask(visit, evil)

    expect(visit.page.locator("#chat-log .la-question")).to_contain_text(evil)
    expect(last_answer(visit)).not_to_be_empty()
    assert visit.page.title() == "LLaMA-Adapter"
    assert visit.page.locator("#chat-log img").count() == 0


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, served: ServedPage) -> None:
    visit = Visit(browser, served, width=390, height=844)
    assert visit.overflow() == 0, "before anything is chosen"
    visit.screenshot("phone-empty")
    visit.page.locator("#chat-samples button").first.click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    ask(visit, "Generate caption of this image " + "averylongword" * 8)
    expect(last_answer(visit)).not_to_be_empty()

    for tab in ("Chat", "Yes/No", "About"):
        visit.open_tab(tab)
        assert visit.overflow() == 0, tab
        visit.screenshot(f"phone-{tab.lower().replace('/', '-')}")
    visit.close()


def test_dark_mode_is_dark_and_readable(browser: Browser, served: ServedPage) -> None:
    visit = Visit(browser, served, dark=True)
    visit.page.locator("#chat-samples button").first.click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    ask(visit, "Generate caption of this image")
    expect(last_answer(visit)).to_have_text(CAPTION)
    visit.screenshot("chat-dark")

    for place in ("#chat-log .la-text", "#chat-log .la-question", "#chat-log .la-figures", "#chat-picture-line p"):
        assert contrast(visit, place) >= 4.5, place
    visit.close()


def test_light_mode_is_readable(visit: Visit) -> None:
    visit.page.locator("#chat-samples button").first.click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    ask(visit, "Generate caption of this image")
    expect(last_answer(visit)).to_have_text(CAPTION)

    for place in ("#chat-log .la-text", "#chat-log .la-question", "#chat-log .la-figures", "#chat-picture-line p"):
        assert contrast(visit, place) >= 4.5, place


def contrast(visit: Visit, selector: str) -> float:
    """Of an element's text with what is behind it, by the rule of the web's accessibility guidelines."""
    colours = visit.page.locator(selector).first.evaluate(
        """(element) => {
            const ink = getComputedStyle(element).color;
            let behind = element;
            const fill = () => getComputedStyle(behind).backgroundColor;
            while (behind.parentElement && /, 0\\)$|transparent/.test(fill())) behind = behind.parentElement;
            return [ink, fill()];
        }"""
    )
    lights = sorted((_luminance(colour) for colour in colours), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_about_says_what_the_model_can_and_cannot(visit: Visit) -> None:
    visit.open_tab("About")
    about = visit.page.get_by_role("tabpanel").filter(has=visit.page.locator("#about-model"))

    for words in ("It knows nothing else.", "cannot see photographs", "Ready.", visit.served.service.info.digest):
        expect(about).to_contain_text(words)
    visit.screenshot("about")
