"""Yes/No in a real browser: one question, many pictures, bars, and new decisions without asking again."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.models.resources import sample_pictures
from tests.e2e.browser import Browser, ServedPage, Visit

pytestmark = pytest.mark.slow

STAR, RING = sample_pictures() / "12-red-star.jpg", sample_pictures() / "24-red-ring.jpg"


@pytest.fixture
def visit(browser: Browser, served: ServedPage) -> Iterator[Visit]:
    visit = Visit(browser, served)
    visit.open_tab("Yes/No")
    yield visit
    served.gate.open()
    visit.close()
    assert visit.foreign_requests() == [], "the page asked somebody else"
    assert visit.complaints == []


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)


def file(path: Path, *, name: str = "", data: bytes | None = None) -> dict[str, Any]:
    """A picture as a browser sends it, under its own or another name, with its own or other bytes."""
    return {"name": name or path.name, "mimeType": "image/jpeg", "buffer": path.read_bytes() if data is None else data}


def upload(visit: Visit, files: Sequence[dict[str, Any]]) -> None:
    visit.page.locator("#yes-no-files input[type=file]").first.set_input_files(list(files))
    expect(visit.page.locator("#yes-no-files tr.file")).to_have_count(len(files))


def ask(visit: Visit) -> None:
    visit.settle()
    visit.page.locator("#yes-no-ask").click()


def slide(visit: Visit, name: str, value: str) -> None:
    box = visit.page.get_by_label(f"number input for {name}")
    box.fill(value)
    box.press("Enter")


def result(visit: Visit, name: str) -> Any:
    return visit.page.locator(".la-result").filter(has_text=name)


def test_many_pictures_get_their_probabilities_and_bad_ones_their_reason(visit: Visit) -> None:
    broken = file(STAR, name="broken <b>.jpg", data=STAR.read_bytes()[:700])
    upload(visit, [file(STAR), file(RING), broken])
    expect(visit.page.locator("#yes-no-question textarea")).to_have_value("Is there a red star?")
    expect(visit.page.locator("#yes-no-choices textarea")).to_have_value("yes, no")
    ask(visit)

    expect(result(visit, "12-red-star.jpg").locator(".la-decision")).to_have_text("yes")
    expect(result(visit, "24-red-ring.jpg").locator(".la-decision")).to_have_text("no")
    expect(result(visit, "12-red-star.jpg").locator(".la-percent").first).to_have_text("> 99.9 %")
    expect(result(visit, "broken <b>.jpg")).to_contain_text("is cut off or damaged")
    expect(visit.page.locator(".la-summary")).to_have_text("1 yes1 no1 without an answer")
    expect(result(visit, "12-red-star.jpg").locator("img")).to_have_attribute(
        "src", re.compile("^data:image/jpeg;base64,")
    )
    visit.screenshot("yes-no")


def test_the_sliders_decide_anew_without_asking_again(visit: Visit) -> None:
    upload(visit, [file(STAR), file(RING)])
    ask(visit)
    expect(visit.page.locator(".la-summary")).to_have_text("1 yes1 no")
    asked = visit.served.service.num_asked

    slide(visit, "Undecided band", "1")
    expect(visit.page.locator(".la-decision.is-open")).to_have_count(2)
    expect(visit.page.locator(".la-summary")).to_have_text("2 undecided")
    expect(visit.page.locator("#yes-no-results")).to_contain_text("undecided between 0% and 100%")
    visit.screenshot("yes-no-undecided")

    slide(visit, "Undecided band", "0")
    slide(visit, "Threshold", "0")
    expect(visit.page.locator(".la-summary")).to_have_text("2 yes")
    assert visit.served.service.num_asked == asked


def test_other_choices_are_scored_as_well(visit: Visit) -> None:
    visit.page.locator("#yes-no-samples").get_by_role("button", name="Sample picture: red star", exact=True).click()
    expect(visit.page.locator("#yes-no-files")).to_contain_text("12-red-star")
    visit.page.locator("#yes-no-question textarea").fill("What color is the star?")
    visit.page.locator("#yes-no-choices textarea").fill("red, green, <i>blue</i>")
    ask(visit)

    expect(result(visit, "12-red-star.jpg").locator(".la-decision")).to_have_text("red")
    expect(result(visit, "12-red-star.jpg").locator("dt")).to_have_text(["red", "green", "<i>blue</i>"])


def test_what_is_missing_is_told_in_a_sentence(visit: Visit) -> None:
    notice = visit.page.locator("#yes-no-notice [role=alert]")
    ask(visit)
    expect(notice).to_have_text("Choose one picture or more first.")

    upload(visit, [file(STAR)])
    visit.page.locator("#yes-no-choices textarea").fill("yes")
    ask(visit)
    expect(notice).to_contain_text("two to twelve different choices")


def test_stop_keeps_what_was_answered(visit: Visit) -> None:
    pictures = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
    upload(visit, [file(path) for path in pictures])
    visit.served.gate.close()
    ask(visit)
    expect(visit.page.locator(".la-decision").first).to_be_visible()
    expect(visit.page.locator(".la-summary")).to_contain_text("under way")
    visit.served.service.cancelled.clear()
    visit.page.locator("#yes-no-stop").click()
    assert visit.served.service.cancelled.wait(60)
    visit.served.gate.open()

    expect(visit.page.locator(".la-summary")).not_to_contain_text("under way")
    expect(visit.page.locator(".la-summary")).to_contain_text("without an answer")
    expect(result(visit, pictures[-1].name)).to_contain_text("Stopped before it was asked.")
    assert 0 < visit.page.locator(".la-decision").count() < len(pictures)
    expect(visit.page.locator("#yes-no-ask")).to_be_enabled()
    visit.screenshot("yes-no-stopped")


def test_a_phone_shows_results_without_sideways_scrolling(browser: Browser, served: ServedPage) -> None:
    visit = Visit(browser, served, width=390, height=844, dark=True)
    visit.open_tab("Yes/No")
    long = "a" * 90 + ".jpg"
    upload(visit, [file(STAR), file(STAR, name=long), file(STAR, name=f"b{long}", data=b"nothing")])
    ask(visit)
    expect(visit.page.locator(".la-decision")).to_have_count(2)

    assert visit.overflow() == 0
    visit.screenshot("phone-yes-no-dark")
    visit.close()
