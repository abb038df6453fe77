"""Chat, About and the appearance of the page in a real browser."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from llama_adapter.app.models.resources import sample_pictures
from tests.e2e.browser import ServedPage, Visit, expect, is_in_window

pytestmark = pytest.mark.slow

MOON = sample_pictures() / "01-yellow-moon-green-cross.png"
CAPTION = "a small yellow moon above a small green cross"
CAPTION_PROMPT = "Generate caption of this image"


def upload(visit: Visit, data: bytes, *, name: str = "moon.png") -> None:
    chosen = visit.page.locator("#chat-picture input[type=file]")
    chosen.set_input_files({"name": name, "mimeType": "image/png", "buffer": data})
    expect(visit.page.locator("#chat-picture-line")).to_contain_text(name)


def choose_sample(visit: Visit, name: str) -> None:
    visit.page.locator("#chat-samples").get_by_role("button", name=f"Sample picture: {name}", exact=True).click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text(name.replace(" ", "-"))


def ask(visit: Visit, question: str = CAPTION_PROMPT) -> None:
    visit.page.get_by_label("Question", exact=True).fill(question)
    visit.press("Ask")


def last_answer(visit: Visit) -> Any:
    return visit.page.locator("#chat-log .la-text").last


def converted(kind: str, **options: Any) -> bytes:
    """The picture of the moon in another format."""
    file = io.BytesIO()
    with Image.open(MOON) as image:
        image.convert("RGB").save(file, kind, **options)
    return file.getvalue()


def noise() -> bytes:
    """A picture of a kind that the model does not know."""
    file = io.BytesIO()
    Image.effect_noise((640, 480), 80).save(file, "PNG")
    return file.getvalue()


@pytest.mark.proves("web: chat and batches", "CPU")
def test_an_uploaded_picture_is_asked_about_and_followed_up(visit: Visit) -> None:
    upload(visit, converted("JPEG", quality=97, comment=b"new bytes"))
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("224 × 224 pixels")
    ask(visit)
    expect(last_answer(visit)).to_have_text(CAPTION)
    log = visit.page.locator("#chat-log")
    expect(log.locator(".is-reused, .la-doubt")).to_have_count(0)

    ask(visit, "What color is the moon?")
    expect(last_answer(visit)).to_have_text("yellow")
    expect(log.locator(".is-reused")).to_have_count(1)
    expect(log.locator(".is-reused")).not_to_be_visible()
    log.locator("summary").last.click()
    expect(log.locator(".is-reused")).to_be_visible()
    log.locator("summary").last.click()
    expect(visit.page.get_by_label("Question", exact=True)).to_have_value("")
    visit.screenshot("chat")

    upload(visit, noise(), name="noise.png")
    ask(visit, "What is in the picture?")
    expect(log.locator(".la-doubt")).to_have_count(1)
    chips = visit.page.locator("#chat-starters button")
    expect(chips).to_have_text(["Describe it", "How many?"])  # no questions about objects that the picture may not have


def test_the_answer_grows_while_it_is_written(visit: Visit) -> None:
    choose_sample(visit, "yellow moon green cross")
    visit.served.gate.close()
    ask(visit)
    for words in ("a", "a small", "a small yellow", "a small yellow moon"):
        expect(last_answer(visit)).to_have_text(words)
        expect(visit.page.locator("#chat-log [aria-busy=true]")).to_have_count(1)
        visit.served.gate.let(1)
    visit.served.gate.open()

    expect(last_answer(visit)).to_have_text(CAPTION)
    expect(visit.page.locator("#chat-log [aria-busy]")).to_have_count(0)


def test_stop_keeps_what_was_written_and_retry_and_clear_follow(visit: Visit) -> None:
    choose_sample(visit, "yellow moon green cross")
    visit.served.gate.close()
    ask(visit)
    visit.served.gate.let(2)
    expect(last_answer(visit)).to_have_text("a small yellow")
    visit.served.service.cancelled.clear()
    visit.page.get_by_role("button", name="Stop").click()
    assert visit.served.service.cancelled.wait(60)
    visit.served.gate.open()

    expect(visit.page.locator("#chat-log .la-cut")).to_have_count(1)
    assert CAPTION.startswith(last_answer(visit).inner_text())
    assert last_answer(visit).inner_text() != CAPTION
    expect(visit.page.get_by_role("button", name="Stop")).to_have_count(0)

    visit.press("Retry")
    expect(last_answer(visit)).to_have_text(CAPTION)
    expect(visit.page.locator("#chat-log .la-turn")).to_have_count(1)

    visit.press("Clear")
    expect(visit.page.locator("#chat-log .la-turn")).to_have_count(0)
    expect(visit.page.locator("#chat-log .la-empty")).to_be_visible()


def test_closing_the_page_cancels_its_question(served: ServedPage, visit: Visit) -> None:
    choose_sample(visit, "yellow moon green cross")
    served.gate.close()
    ask(visit)
    expect(last_answer(visit)).to_have_text("a")
    before = served.gate.num_steps
    served.service.cancelled.clear()
    visit.page.close()
    assert served.service.cancelled.wait(30), "the question was not cancelled"
    served.gate.open()

    assert served.service.wait_until_idle(30)
    assert served.gate.num_steps <= before + 2, "the engine went on"


def test_a_sample_and_a_suggested_question_need_no_keyboard(visit: Visit) -> None:
    choose_sample(visit, "red star")
    visit.press("Which colour?")
    expect(visit.page.locator("#chat-log .la-question")).to_contain_text("What color is the star?")
    expect(last_answer(visit)).to_have_text("red")

    choose_sample(visit, "blue moon")
    expect(visit.page.locator("#chat-log .la-turn")).to_have_count(0)
    visit.press("Where?")
    expect(visit.page.locator("#chat-log .la-question")).to_contain_text("Where is the moon?")
    visit.press("Ask")
    expect(visit.page.locator("#chat-log .la-question").last).to_contain_text(CAPTION_PROMPT)
    expect(last_answer(visit)).to_have_text("a large blue moon at the center")


def test_a_reload_keeps_the_conversation_and_a_new_visitor_has_none(
    visit: Visit, open_page: Callable[..., Visit]
) -> None:
    choose_sample(visit, "red star")
    ask(visit)
    expect(last_answer(visit)).to_contain_text("red star")
    visit.reload()
    expect(last_answer(visit)).to_contain_text("red star")
    expect(visit.page.locator("#chat-picture img")).to_have_js_property("naturalWidth", 224)
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("12-red-star.jpg")
    visit.press("Retry")
    expect(visit.page.locator("#chat-log .is-reused")).to_have_count(1)
    expect(last_answer(visit)).to_contain_text("red star")

    other = open_page()
    expect(other.page.locator("#chat-log .la-empty")).to_be_visible()
    expect(other.page.locator("#chat-log .la-turn")).to_have_count(0)


def test_the_keyboard_alone_is_enough(visit: Visit) -> None:
    visit.page.locator("#chat-samples button").first.focus()
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    for _ in range(60):  # past samples, log and suggested questions
        visit.page.keyboard.press("Tab")
        if visit.page.evaluate("document.activeElement.tagName") == "TEXTAREA":
            break
    visit.page.keyboard.type("Where is the moon?")
    outline = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    visit.page.keyboard.press("Enter")

    expect(last_answer(visit)).to_have_text("at the top right")
    assert outline == "solid", "the focus must be visible"


def test_broken_and_missing_pictures_are_explained(visit: Visit) -> None:
    notice = visit.page.locator("#chat-notice [role=alert]")
    ask(visit, "Where is the moon?")
    expect(notice).to_contain_text("Choose a picture first")

    upload(visit, MOON.read_bytes()[:900], name="broken <b>x.png")
    expect(visit.page.locator("#chat-picture-line [role=alert]")).to_contain_text("broken <b>x.png")
    expect(visit.page.locator("#chat-picture-line code")).to_have_text("broken <b>x.png")
    expect(visit.page.locator("#chat-picture-line")).not_to_contain_text("`")
    expect(visit.page.locator("#chat-picture img")).to_have_count(0)
    visit.press("Ask")
    expect(notice).to_contain_text("Choose a picture first")


def test_formats_that_browsers_do_not_show_get_a_preview_and_an_answer(visit: Visit) -> None:
    upload(visit, converted("TIFF"), name="scan.tiff")
    expect(visit.page.locator("#chat-picture img")).to_have_attribute("src", re.compile("preview.webp"))
    ask(visit)

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
    ask(visit)

    expect(last_answer(visit)).to_have_text(CAPTION)


def test_a_picture_is_taken_by_the_camera(visit: Visit) -> None:
    visit.uses_camera = True
    visit.page.get_by_label("Capture from camera").click()
    visit.page.get_by_text("Click to Access Webcam").click()
    visit.page.wait_for_function("document.querySelector('#chat-picture video')?.videoWidth > 0")
    visit.page.get_by_label("capture photo").click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    ask(visit)

    expect(last_answer(visit)).to_contain_text("a ")


def set_maximum_tokens(visit: Visit, number: int) -> None:
    """Type the number until it stays. Gradio may replace controls that were just opened and restore their old value."""
    field = visit.page.get_by_label("number input for Maximum tokens").locator("visible=true")
    slider = visit.page.get_by_label("range slider for Maximum tokens").locator("visible=true")
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


def test_a_question_without_a_picture_is_marked_and_survives_a_reload(visit: Visit) -> None:
    choose_sample(visit, "red star")
    visit.page.get_by_role("button", name="Settings").locator("visible=true").click()
    visit.page.get_by_label("Without a picture").check()
    expect(visit.page.locator("#chat-starters")).to_contain_text("knows pictures only")
    expect(visit.page.locator("#chat-starters button")).to_have_count(0)
    ask(visit, "What color is the star?")
    expect(last_answer(visit)).to_contain_text("I only know")
    expect(visit.page.locator("#chat-log .la-mark")).to_have_count(1)
    visit.screenshot("chat-text")

    visit.reload()
    expect(visit.page.locator("#chat-log .la-mark")).to_have_count(1)
    expect(visit.page.locator("#chat-starters button")).to_have_count(0)
    visit.press("Retry")
    expect(visit.page.locator("#chat-log .la-mark")).to_have_count(1)
    expect(last_answer(visit)).to_contain_text("I only know")
    visit.page.get_by_role("button", name="Settings").locator("visible=true").click()
    visit.page.get_by_label("Without a picture").uncheck()
    expect(visit.page.locator("#chat-starters button")).not_to_have_count(0)
    visit.press("Retry")
    expect(visit.page.locator("#chat-log .la-mark")).to_have_count(0)
    expect(last_answer(visit)).to_have_text("red")


def test_settings_reach_the_answer(visit: Visit) -> None:
    choose_sample(visit, "yellow moon green cross")
    visit.page.get_by_role("button", name="Settings").locator("visible=true").click()
    set_maximum_tokens(visit, 2)
    ask(visit)
    expect(last_answer(visit)).to_have_text("a small")
    expect(visit.page.locator("#chat-log .la-cut")).to_have_count(1)

    visit.page.get_by_label("Seed").locator("visible=true").fill("seven")
    ask(visit)
    expect(visit.page.locator("#chat-notice [role=alert]")).to_contain_text("The seed must be a whole number")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_readable_and_a_phone_needs_no_sideways_scrolling(open_page: Callable[..., Visit], dark: bool) -> None:
    visit = open_page(width=390, height=844, dark=dark)
    assert visit.overflow() == 0, "before anything is chosen"
    for button in visit.page.locator("#chat-picture .source-selection button").all():
        assert button.evaluate("one => getComputedStyle(one, '::after').content") in ('"Upload"', '"Camera"', '"Paste"')
        assert button.evaluate("one => Math.min(one.clientWidth, one.clientHeight)") >= 24
    upload(visit, noise(), name="noise.png")
    visit.press("Ask")
    expect(visit.page.locator("#chat-log .la-doubt")).to_be_visible()
    assert contrast(visit, "#chat-log .la-doubt") >= 4.5
    choose_sample(visit, "yellow moon green cross")
    evil = "<img src=x onerror=\"document.title='owned'\"> ${document.title='owned'} {{value}} **x**"
    ask(visit, evil + " averylongword" * 8 + "averylongword" * 8)
    expect(last_answer(visit)).not_to_be_empty()
    expect(visit.page.locator("#chat-log .la-question")).to_contain_text(evil)
    assert (visit.page.title(), visit.page.locator("#chat-log img").count()) == ("LLaMA-Adapter", 0)
    for place in ("#chat-question", "#chat-ask", "#chat-starters button >> nth=0", "#chat-starters button >> nth=-1"):
        assert is_in_window(visit, place), place
    for place in ("#chat-log .la-text", "#chat-log .la-question", "#chat-log .la-figures", "#chat-picture-line p"):
        assert contrast(visit, place) >= 4.5, place
    for tab in ("Chat", "Batch", "Throughput", "About"):
        visit.open_tab(tab)
        assert visit.overflow() == 0, tab
        visit.screenshot(f"phone-{tab.lower()}-{'dark' if dark else 'light'}")
    expect(visit.page.locator("#about-state")).to_contain_text("Ready.")
    expect(visit.page.locator("#about-model")).to_contain_text(visit.served.service.info.digest)


def contrast(visit: Visit, selector: str) -> float:
    """The contrast ratio of an element's text and background, as defined by the web's accessibility guidelines."""
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
