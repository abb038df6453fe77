"""Chat, About and the appearance of the page in a real browser."""

import asyncio
import io
import re
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from PIL import Image

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.serving.web import chat
from tests.app.serving.web.browser import ServedPage, Visit, expect, is_in_window

pytestmark = pytest.mark.slow

MOON, STAR = (sample_pictures() / name for name in ("01-yellow-moon-green-cross.png", "12-red-star.jpg"))
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


def ask_and_hold(visit: Visit) -> None:
    """Ask for a caption, and stop its answer after the first word."""
    visit.served.gate.close()
    ask(visit)
    expect(last_answer(visit)).to_have_text("a")


def expect_turns(visit: Visit, number: int) -> None:
    expect(visit.page.locator("#chat-log .la-turn")).to_have_count(number)


def converted(kind: str, **options: Any) -> bytes:
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


def test_stop_keeps_what_was_written_and_retry_and_clear_follow(visit: Visit) -> None:
    choose_sample(visit, "yellow moon green cross")
    ask_and_hold(visit)
    visit.served.gate.let(1)
    expect(last_answer(visit)).to_have_text("a small")
    expect(visit.page.locator("#chat-log [aria-busy=true]")).to_have_count(1)
    visit.served.gate.let(1)
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
    expect(visit.page.locator("#chat-log [aria-busy]")).to_have_count(0)
    expect_turns(visit, 1)

    visit.press("Clear")
    expect_turns(visit, 0)
    expect(visit.page.locator("#chat-log .la-empty")).to_be_visible()


def test_closing_the_page_cancels_its_question(served: ServedPage, visit: Visit) -> None:
    choose_sample(visit, "yellow moon green cross")
    ask_and_hold(visit)
    before = served.gate.num_steps
    served.service.cancelled.clear()
    visit.page.close()
    assert served.service.cancelled.wait(30), "the question was not cancelled"
    served.gate.open()

    assert served.service.wait_until_idle(30)
    assert served.gate.num_steps <= before + 2, "the engine went on"


def expect_visible_focus(visit: Visit) -> None:
    """In one step: a button such as Stop may be replaced between two."""
    outline, html = visit.page.evaluate("""() => {
        const one = document.activeElement;
        return [getComputedStyle(one.closest('label.la-chip') ?? one).outlineStyle, one.outerHTML];
    }""")
    assert outline == "solid", html


def tab(visit: Visit, place: str, *, most: int, key: str = "Tab") -> int:
    """Press the Tab key until the focus is in this place; returns how often. The focus must always be visible."""
    for count in range(1, most + 1):
        visit.page.keyboard.press(key)
        expect_visible_focus(visit)
        if visit.page.locator(f"{place} :focus, {place}:focus").count():
            return count
    raise AssertionError(f"{place} is not reached")


def test_the_keyboard_alone_is_enough(visit: Visit) -> None:
    before = tab(visit, "#chat-picture", most=5)
    assert visit.page.get_by_label("Choose a file").evaluate("one => one === document.activeElement")
    assert tab(visit, "#chat-question", most=3) == 3, "after the buttons for a picture"
    assert before == 5, "after the tabs of the page"
    tab(visit, "#chat-starters", most=2)
    tab(visit, "#chat-samples", most=4)
    for key in ("ArrowRight", "End", "Home", "ArrowUp", "ArrowDown", "ArrowLeft"):
        visit.page.keyboard.press(key)
    focused = visit.page.locator(":focus")
    expect(focused).to_have_accessible_name("Sample picture: black circle black cross")  # the end of the first row
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("black-circle-black-cross")
    expect(visit.page.locator("#chat-samples [tabindex='0']")).to_have_count(1)
    tab(visit, "#chat-question", most=6, key="Shift+Tab")
    visit.page.keyboard.type("Where is the circle?")
    visit.served.gate.close()
    visit.page.keyboard.press("Enter")
    expect(visit.page.get_by_role("button", name="Stop")).to_have_count(1)
    tab(visit, "#chat-stop", most=1)
    visit.served.gate.open()
    expect(focused).to_have_text("Ask")
    expect_visible_focus(visit)
    expect(last_answer(visit)).to_contain_text("at the")

    expect(visit.page.locator("#chat-starters button")).not_to_have_count(2)
    tab(visit, "#chat-starters", most=1)
    visit.page.keyboard.press("ArrowRight")
    expect(focused).to_have_text("How many?")
    visit.page.keyboard.press("Enter")
    expect_turns(visit, 2)
    expect(last_answer(visit)).to_have_text("two")


def test_buttons_that_are_replaced_keep_the_focus(visit: Visit) -> None:
    focused = visit.page.locator(":focus")
    choose_sample(visit, "red star")
    ask(visit)
    expect(visit.page.locator("#chat-starters button")).not_to_have_count(2)
    visit.wait_for_events()
    second = visit.page.locator("#chat-starters button").nth(1)
    second.focus()
    visit.page.keyboard.press("Enter")
    expect_turns(visit, 2)
    visit.wait_for_events()
    expect(second).to_be_focused()

    question = visit.page.get_by_label("Question", exact=True)
    for name in ("Retry", "Clear"):
        visit.page.get_by_role("button", name=name).focus()
        visit.page.keyboard.press("Enter")
        expect(question).to_be_focused()
        visit.wait_for_events()
        expect(question).to_be_focused()

    visit.served.gate.close()
    visit.page.get_by_role("button", name="Ask").focus()
    visit.page.keyboard.press("Enter")
    expect(focused).to_have_text("Stop")
    visit.page.mouse.click(5, 5)
    visit.served.gate.open()
    expect(visit.page.get_by_role("button", name="Retry")).to_be_visible()
    expect(focused).to_have_count(0)


def test_an_answer_that_is_left_does_not_come_back(visit: Visit) -> None:
    choose_sample(visit, "red star")
    ask_and_hold(visit)
    visit.page.get_by_role("button", name="Remove", exact=True).click()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("No picture yet")
    expect_turns(visit, 0)
    visit.served.gate.open()
    visit.wait_for_events()
    expect_turns(visit, 0)


def test_wrong_files_leave_the_picture_the_questions_and_a_growing_answer(visit: Visit) -> None:
    text = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no picture"}
    broken = {"name": "broken.png", "buffer": MOON.read_bytes()[:900]}
    choose_sample(visit, "red star")
    ask(visit)
    expect(last_answer(visit)).to_contain_text("red star")
    ask_and_hold(visit)
    visit.bring("drop", text, broken)
    told = visit.page.locator("#chat-picture-line [role=alert]")
    expect(told.locator("code")).to_have_text(["notes.txt", "broken.png"])
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("12-red-star.jpg")
    expect(visit.page.locator("#chat-picture img")).to_have_js_property("naturalWidth", 224)
    visit.screenshot("wrong-files")
    visit.served.gate.open()
    expect(last_answer(visit)).to_contain_text("red star")
    expect_turns(visit, 2)

    visit.bring("paste", text, MOON, broken)
    expect(visit.page.locator("#chat-picture-line")).to_contain_text(MOON.name)
    expect(told.locator("code")).to_have_text(["notes.txt"])
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("1 more file was left out")
    visit.press("Ask")
    expect(last_answer(visit)).to_have_text(CAPTION)
    visit.open_tab("About")
    assert visit.bring("drop", STAR) is False, "the browser opens it in place of the page"
    visit.open_tab("Chat")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text(MOON.name)


def test_a_question_that_overtakes_an_answer_leaves_its_words_and_keeps_its_own(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns_of, is_answered = chat.answer_turns, threading.Event()

    async def overtaken_ends_last(*arguments: Any, question: str, **options: Any) -> AsyncGenerator[Any]:
        try:
            async for turn in turns_of(*arguments, question=question, **options):
                yield turn
        finally:
            if question != CAPTION_PROMPT:
                is_answered.set()
            else:
                await asyncio.to_thread(is_answered.wait, 30)
                await asyncio.sleep(0.5)  # also after the last update of the other question

    monkeypatch.setattr(chat, "answer_turns", overtaken_ends_last)
    choose_sample(visit, "red star")
    ask_and_hold(visit)
    visit.page.get_by_label("Question", exact=True).fill("What color is the star?")
    visit.page.keyboard.press("Enter")
    expect_turns(visit, 2)
    visit.served.gate.open()
    expect(visit.page.locator("#chat-log .la-text")).to_have_text(["a", "red"])
    visit.page.wait_for_timeout(1500)  # for the last update of the overtaken question, which changes nothing
    expect(visit.page.locator("#chat-log .la-text")).to_have_text(["a", "red"])
    expect(visit.page.get_by_text("Stopped for the next question")).to_be_visible()


def test_a_slow_upload_shows_its_percentage_and_a_question_waits_for_it(visit: Visit) -> None:
    picture, upload_ = visit.page.locator("#chat-picture"), visit.page.locator("#chat-picture .la-upload")
    question = visit.page.get_by_label("Question", exact=True)
    upload(visit, MOON.read_bytes()[:900], name="broken.png")
    with visit.slow_uploads():
        visit.bring("drop", {"name": "noise.png", "buffer": noise()})
        expect(upload_).to_contain_text("Uploading noise.png")
        expect(upload_).to_contain_text(re.compile("[1-9][0-9]?%"))
        expect(upload_.get_by_role("progressbar")).to_have_attribute("value", re.compile("[1-9][0-9]?"))
        expect(picture.get_by_text("broken.png")).not_to_be_visible()
        assert visit.is_seen_in_system_colours(".la-upload progress")
        question.fill("What is it?")
        question.press("Enter")
        waits = visit.page.get_by_text("The question waits for the upload")
        expect(waits).to_be_visible()
        expect_turns(visit, 0)
        visit.screenshot("slow-upload")
    expect(visit.page.locator("#chat-log .la-question")).to_contain_text("What is it?")
    expect(last_answer(visit)).not_to_be_empty()
    expect(picture).to_contain_text("640 × 480 pixels")
    expect(waits).to_have_count(0)
    expect(upload_).to_be_empty()

    with visit.slow_uploads():
        visit.bring("drop", {"name": "other.png", "buffer": noise()})
        visit.page.get_by_role("button", name="Retry").click()
        expect(waits).to_be_visible()
        picture.get_by_role("button", name="Cancel").click()
    expect(upload_).to_have_text("The upload was cancelled.")
    expect(picture.get_by_text("640 × 480 pixels")).to_have_count(1)
    expect(visit.page.get_by_text("the question was not sent")).to_be_visible()
    expect_turns(visit, 1)

    with visit.slow_uploads():
        visit.bring("drop", {"name": "other.png", "buffer": noise()})
        expect(upload_).to_contain_text("Uploading other.png")
        visit.press("Ask")
        choose_sample(visit, "red star")  # the later choice counts
    expect(last_answer(visit)).to_contain_text("red star")
    expect(upload_).to_be_empty()


def test_a_reload_during_an_answer_asks_the_question_again(visit: Visit, open_page: Callable[..., Visit]) -> None:
    upload(visit, MOON.read_bytes())
    visit.served.gate.close()
    visit.press("Ask")
    expect(last_answer(visit)).to_have_text("a")
    visit.reload_while_busy()
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("224 × 224 pixels, 2 kB")
    expect(visit.page.locator("#chat-log .la-question")).to_contain_text(CAPTION_PROMPT)
    other = open_page()
    expect(other.page.locator("#chat-log .la-empty")).to_be_visible()
    expect(other.page.locator("#chat-picture-line")).to_contain_text("No picture yet")
    visit.served.gate.open()

    expect(last_answer(visit)).to_have_text(CAPTION)
    expect_turns(visit, 1)
    expect(visit.page.get_by_text("Stopped")).to_have_count(0)
    expect(visit.page.locator("#chat-ask")).to_be_visible()
    visit.page.goto(f"{visit.served.url}/robots.txt")
    visit.page.go_back()
    expect(last_answer(visit)).to_have_text(CAPTION)


def test_a_picture_is_pasted(visit: Visit) -> None:
    visit.page.evaluate(
        """async (bytes) => {
            const blob = new Blob([new Uint8Array(bytes)], {type: "image/png"});
            await navigator.clipboard.write([new ClipboardItem({"image/png": blob})]);
        }""",
        list(MOON.read_bytes()),
    )
    visit.press("Paste")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("224 × 224 pixels")
    ask(visit)

    expect(last_answer(visit)).to_have_text(CAPTION)

    star = {"name": "image.png", "buffer": STAR.read_bytes()}
    word = {"text/plain": "A moon?", "text/html": "<p>A moon?</p>"}  # as Word copies a text
    link = {"text/plain": "https://a.example/a.png", "text/html": "<img src='a.png'>"}
    visit.page.get_by_label("Question", exact=True).focus()
    assert visit.bring("paste", star, texts=word)
    ask(visit, "What color is the moon?")
    expect(last_answer(visit)).to_have_text("yellow")
    expect_turns(visit, 2)
    for place, texts in (("textarea", link), ("#chat-picture input", word), ("body", word)):
        choose_sample(visit, "red star")
        visit.page.locator(place).locator("visible=true").first.evaluate(
            "(one) => { document.activeElement.blur(); one.focus(); }"
        )
        assert visit.bring("paste", star, texts=texts) is False, place
        expect(visit.page.locator("#chat-picture-line")).to_contain_text("image.png")
    expect_turns(visit, 0)


def test_a_question_has_the_direction_of_its_language_and_is_never_cut(visit: Visit) -> None:
    choose_sample(visit, "red star")
    question = visit.page.get_by_label("Question", exact=True)
    ask(visit, "ما هذا؟ 12!")
    expect(visit.page.get_by_role("button", name="Retry")).to_be_visible()
    visit.wait_for_events()
    last_answer(visit).evaluate("(one) => { one.textContent = 'نجمة حمراء 12!'; }")
    ends = """(text) => [0, text.length - 1].map((at) => {
        const range = document.createRange();
        range.setStart(text, at);
        range.setEnd(text, at + 1);
        return range.getBoundingClientRect().x;
    })"""
    for place in (".la-question", ".la-text"):
        begin, end = visit.page.evaluate(f"({ends})(document.querySelector('{place}').lastChild)")
        assert end < begin, place  # from right to left
    expect(question).to_have_css("unicode-bidi", "plaintext")
    last_answer(visit).evaluate("(one) => { one.innerHTML = '<span class=la-dots><i></i><i></i><i></i></span>'; }")
    assert visit.is_seen_in_system_colours(".la-dots")

    question.focus()
    visit.page.keyboard.insert_text("x" * 20_001)  # as if pasted; `fill` ignores what the box allows
    visit.press("Ask")
    expect(visit.page.locator("#chat-log .la-problem")).to_contain_text("20,001 long, 20,000 is the limit")


def test_a_picture_is_taken_by_the_camera(visit: Visit) -> None:
    choose_sample(visit, "red star")
    visit.page.evaluate("""() => {
        const devices = navigator.mediaDevices, open = devices.getUserMedia.bind(devices);
        devices.getUserMedia = (wanted) => { window.wanted = wanted; return open(wanted); };
    }""")
    visit.press("Camera")
    visit.press("Cancel")
    assert visit.page.evaluate("wanted.video.facingMode") == "environment", "not the person in front of a phone"
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("12-red-star")
    visit.press("Camera")
    visit.press("Take the picture")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("photo.png")
    expect(visit.page.locator("#chat-picture-line")).to_contain_text("pixels")
    ask(visit)

    expect(last_answer(visit)).to_contain_text("a ")


def test_a_question_without_a_picture_is_marked(visit: Visit) -> None:
    choose_sample(visit, "red star")
    visit.page.get_by_role("button", name="Settings").locator("visible=true").click()
    visit.page.get_by_label("Without a picture").check()
    expect(visit.page.locator("#chat-starters")).to_contain_text("knows pictures only")
    expect(visit.page.locator("#chat-starters button")).to_have_count(0)
    ask(visit, "What color is the star?")
    expect(last_answer(visit)).to_contain_text("I only know")
    expect(visit.page.locator("#chat-log .la-mark")).to_have_count(1)
    visit.screenshot("chat-text")
    visit.page.get_by_label("Without a picture").uncheck()
    expect(visit.page.locator("#chat-starters button")).not_to_have_count(0)
    visit.press("Retry")
    expect(last_answer(visit)).to_have_text("red")


def test_text_is_readable_and_a_phone_needs_no_sideways_scrolling(open_page: Callable[..., Visit]) -> None:
    visit = open_page(width=390, height=844, dark=True)
    assert visit.overflow() == 0, "before anything is chosen"
    for button in visit.page.locator("#chat-picture .la-drop .la-chip").all():
        assert button.evaluate("one => Math.min(one.clientWidth, one.clientHeight)") >= 24
    upload(visit, noise(), name="noise.png")
    visit.press("Ask")
    expect(visit.page.locator("#chat-log .la-doubt")).to_be_visible()
    assert_readable(visit, "#chat-log .la-doubt")
    choose_sample(visit, "yellow moon green cross")
    evil = "<img src=x onerror=\"document.title='owned'\"> ${document.title='owned'} {{value}} **x**"
    ask(visit, evil + " averylongword" * 8 + "averylongword" * 8)
    expect(last_answer(visit)).not_to_be_empty()
    expect(visit.page.locator("#chat-log .la-question")).to_contain_text(evil)
    assert (visit.page.title(), visit.page.locator("#chat-log img").count()) == ("LLaMA-Adapter", 0)
    for place in ("#chat-question", "#chat-ask", "#chat-starters button >> nth=0", "#chat-starters button >> nth=-1"):
        assert is_in_window(visit, place), place
    assert_readable(
        visit, "#chat-log .la-text", "#chat-log .la-question", "#chat-log .la-figures", "#chat-picture-line p"
    )
    for tab in ("Chat", "Batch", "Throughput", "About"):
        visit.open_tab(tab)
        assert visit.overflow() == 0, tab
        for dark in visit.themes():
            visit.screenshot(f"phone-{tab.lower()}-{'dark' if dark else 'light'}")
    expect(visit.page.locator("#about-state")).to_contain_text("Ready.")
    expect(visit.page.locator("#about-model")).to_contain_text(visit.served.service.info.digest)
    visit.open_tab("Chat")
    log = visit.page.locator("#chat-log .la-scroll")
    assert log.evaluate("(one) => { document.querySelector('.la-picture').remove(); return one.clientHeight; }") > 400


def assert_readable(visit: Visit, *places: str) -> None:
    """The text of these elements has enough contrast in both themes."""
    for dark in visit.themes():
        for place in places:
            assert contrast(visit, place) >= 4.5, (place, dark)


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


def test_a_question_asked_in_the_moment_in_which_the_last_answer_ends_is_not_lost(visit: Visit) -> None:
    choose_sample(visit, "yellow moon green cross")
    visit.served.gate.close()
    ask(visit)
    expect(visit.page.locator("#chat-log [aria-busy=true]")).to_have_count(1)
    visit.page.get_by_label("Question", exact=True).fill("What color is the moon?")
    visit.page.evaluate(
        """() => {
            const press = () => {
                const ask = document.querySelector('#chat-ask');
                if (!ask || ask.offsetParent === null) return;
                watcher.disconnect();
                ask.click();
            };
            const watcher = new MutationObserver(press);
            watcher.observe(document.body, {subtree: true, childList: true, attributes: true});
        }"""
    )
    visit.served.gate.open()

    expect(visit.page.locator("#chat-log .la-text")).to_have_count(2)
    expect(last_answer(visit)).to_have_text("yellow")
