"""Batch and Throughput in a real browser."""

import csv
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.serving.online.waiting import wait_for
from tests.app.serving.web.browser import SAMPLES, ServedPage, Visit, expect, is_in_window

pytestmark = pytest.mark.slow

STAR, RING = SAMPLES[11], SAMPLES[23]
MOON = "a small yellow moon above a small green cross"  # the caption of the first sample


@pytest.fixture
def visit(visit: Visit) -> Visit:
    visit.open_tab("Batch")
    return visit


def add(visit: Visit, *files: Any) -> None:
    visit.page.get_by_label("Add files").set_input_files(list(files))
    expect(visit.page.locator("#batch-files li")).to_have_count(len(files))


def ask(visit: Visit, question: str, choices: str) -> None:
    visit.page.get_by_label("Instruction or question").fill(question)
    visit.page.get_by_label("Choices (optional)").fill(choices)
    expect(visit.page.locator("#batch-rule")).to_be_visible()
    visit.press("Start")


def finished(visit: Visit, state: str = "done") -> Any:
    progress = visit.page.locator(f"#batch-progress [data-state={state}]")
    expect(progress).to_be_visible()
    return progress


def download(visit: Visit, button: str) -> bytes:
    with visit.page.expect_download() as caught:
        visit.page.locator(button).click()
    path = caught.value.path()
    assert path is not None
    return Path(path).read_bytes()


def records(visit: Visit) -> list[dict[str, Any]]:
    return [json.loads(line) for line in download(visit, "#batch-download-jsonl").splitlines()]


def slide(visit: Visit, name: str, value: str) -> None:
    box = visit.page.get_by_label(f"number input for {name}")
    box.fill(value)
    box.press("Enter")


def result(visit: Visit, name: str) -> Any:
    return visit.page.locator(".la-result").filter(has_text=name)


def zipped(tmp_path: Path) -> Path:
    path = tmp_path / "more.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for sample in SAMPLES[10:14]:
            archive.write(sample, f"shapes/{sample.name}")
        archive.writestr("notes.txt", "no picture")
        archive.writestr("__MACOSX/._x.png", "hidden")
        archive.writestr("../out.png", SAMPLES[5].read_bytes())
    return path


@pytest.mark.proves("web: chat and batches", "CPU")
def test_pictures_a_zip_and_a_corrupt_file_are_answered_shown_and_downloaded(visit: Visit, tmp_path: Path) -> None:
    for suffix in ("jsonl", "csv", "zip"):
        expect(visit.page.locator(f"#batch-download-{suffix}")).to_have_count(0)
    assert is_in_window(visit, "#batch-start")
    expect(visit.page.locator("#batch-progress")).to_contain_text("No pictures yet")
    expect(visit.page.locator("#batch-rule")).not_to_be_visible()
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(SAMPLES[3].read_bytes()[:500])
    add(visit, *SAMPLES[:8], broken, zipped(tmp_path))
    expect(visit.page.locator("#batch-progress")).to_contain_text("10 files added")
    visit.press("Start")

    progress = finished(visit)
    expect(progress).to_contain_text("14 of 14 pictures")
    expect(progress).to_contain_text("1 failed")
    expect(progress).to_contain_text("skipped 1 file that is not a picture, 1 hidden file")
    expect(visit.page.locator("#batch-cards figure")).to_have_count(13)
    expect(visit.page.locator("#batch-cards figure").first).to_contain_text(MOON)
    assert visit.page.locator("#batch-cards img").evaluate_all("all => all.every(one => one.naturalWidth == 160)")
    expect(visit.page.locator("#batch-failed li")).to_have_count(1)
    expect(visit.page.locator("#batch-failed li")).to_contain_text("broken.jpg")
    for name in ("broken.jpg", "01-yellow-moon-green-cross.png", "out.png"):
        expect(visit.page.locator("bdi").filter(has_text=name).locator("visible=true")).to_have_count(1)
    text = visit.page.locator(".la-batch-text").first
    expect(text).to_have_css("unicode-bidi", "plaintext")
    text.evaluate("(one) => { one.textContent = 'word '.repeat(500); }")
    expect(text).to_have_css("overflow-y", "auto")  # a long answer can be read
    # No results are hidden behind an inner edge.
    assert visit.page.locator(".la-batch-grid").evaluate("one => one.scrollHeight - one.clientHeight") == 0
    visit.screenshot("batch")
    visit.page.set_viewport_size({"width": 600, "height": 900})
    expect(visit.page.locator(".la-batch-grid")).to_have_css("grid-template-columns", re.compile(r"^\S+ \S+$"))

    lines = records(visit)
    assert [line["picture"] for line in lines][-5:] == [*(f"shapes/{path.name}" for path in SAMPLES[10:14]), "out.png"]
    assert (lines[0]["text"], lines[8]["error"]["code"]) == (MOON, "truncated")
    sheet = csv.DictReader(io.StringIO(download(visit, "#batch-download-csv").decode("utf-8-sig")))
    assert [row["text"] for row in sheet] == [line["text"] for line in lines]
    with zipfile.ZipFile(io.BytesIO(download(visit, "#batch-download-zip"))) as sidecars:
        assert sidecars.read("01-yellow-moon-green-cross.txt").decode() == MOON + "\n"
        assert len(sidecars.namelist()) == 14

    rate = re.search(r"[\d.]+ pictures/s", progress.inner_text())
    assert rate is not None
    visit.open_tab("Throughput")
    report = visit.page.locator("#throughput-report")
    expect(report).to_contain_text("Last batch")
    expect(report.locator(".la-plot-facts")).to_contain_text(rate.group())
    expect(report.get_by_role("img", name="Stage times: ")).to_be_visible()
    row = report.locator("tbody tr")
    expect(row).to_have_count(1)
    assert [cell.inner_text() for cell in row.locator("td").all()][1:3] == ["13", "1"]  # answered, failed
    visit.screenshot("throughput")


def test_a_folder_brings_its_pictures_only_and_clear_forgets_them(visit: Visit, tmp_path: Path) -> None:
    for sample in SAMPLES[:2]:
        (tmp_path / sample.name).write_bytes(sample.read_bytes())
    (tmp_path / "notes.txt").write_text("no picture")
    with visit.page.expect_file_chooser() as chooser:
        visit.page.get_by_text("Add a folder", exact=True).click()
    chooser.value.set_files(tmp_path)
    expect(visit.page.locator("#batch-files summary")).to_have_text("3 files")
    visit.press("Start")
    expect(finished(visit)).to_contain_text("2 of 2 pictures")
    expect(visit.page.locator("#batch-progress li")).to_have_count(1)

    visit.press("Clear")
    expect(visit.page.locator("#batch-progress .la-batch-empty")).to_be_visible()
    expect(visit.page.locator("#batch-files li")).to_have_count(0)
    expect(visit.page.locator("#batch-cards figure")).to_have_count(0)
    expect(visit.page.locator("#batch-download-jsonl")).to_have_count(0)


def test_choices_give_probabilities_and_the_sliders_decide_without_asking_again(
    open_page: Callable[..., Visit],
) -> None:
    visit = open_page(width=390, height=844, dark=True)
    visit.open_tab("Batch")
    files = [{"name": f"{'a' * 90}.jpg", "mimeType": "image/jpeg", "buffer": b"nothing"}]
    files += [{"name": path.name, "mimeType": "image/jpeg", "buffer": path.read_bytes()} for path in (STAR, RING)]
    add(visit, *files)
    visit.page.get_by_role("button", name="A red star?").click()
    expect(visit.page.get_by_label("Choices (optional)")).to_have_value("yes, no")
    expect(visit.page.locator("#batch-rule")).to_be_visible()
    visit.page.locator("#batch-start").focus()
    visit.page.keyboard.press("Enter")
    finished(visit)
    assert is_in_window(visit, "#batch-progress")
    assert is_in_window(visit, "#batch-start")

    expect(result(visit, STAR.name).locator(".la-decision")).to_have_text("yes")
    expect(result(visit, STAR.name).locator(".la-percent").first).to_have_text(">99.9%")
    expect(result(visit, STAR.name).locator("img")).to_have_js_property("naturalWidth", 160)
    expect(result(visit, RING.name).locator(".la-decision")).to_have_text("no")
    expect(visit.page.locator(".la-summary")).to_have_text("1 yes1 no1 failed")
    assert visit.overflow() == 0
    visit.screenshot("batch-choices-phone-dark")
    for bar in (".la-track", ".la-batch-bar"):
        assert visit.is_seen_in_system_colours(bar), bar
    lines = records(visit)
    assert [line["text"] for line in lines] == ["", "yes", "no"]
    assert [sum(line["choice"].values()) for line in lines[1:]] == [pytest.approx(1.0)] * 2

    asked = visit.served.service.num_asked
    slide(visit, "Undecided band", "1")
    expect(visit.page.locator(".la-summary")).to_have_text("2 undecided1 failed")
    expect(visit.page.locator(".la-decision.is-open")).to_have_count(2)
    slide(visit, "Undecided band", "0")
    slide(visit, "Threshold", "0")
    expect(visit.page.locator(".la-summary")).to_have_text("2 yes1 failed")
    assert visit.served.service.num_asked == asked


def test_mistakes_are_explained_and_nothing_is_asked(visit: Visit) -> None:
    asked = visit.served.service.num_asked
    visit.press("Start")
    expect(visit.page.get_by_role("alert")).to_contain_text("Add pictures, a folder or a zip first")
    visit.page.locator("#batch-samples").get_by_role("button", name="Sample picture: red star", exact=True).click()
    expect(visit.page.locator("#batch-files li")).to_contain_text("12-red-star")
    ask(visit, "What is it?", "only one")
    expect(visit.page.get_by_role("alert")).to_contain_text("only one")
    many = ", ".join(map(str, range(1000)))
    for label, pasted in (("Choices (optional)", many), ("Instruction or question", "x" * 20_001)):
        visit.page.get_by_label(label).fill("")
        visit.page.keyboard.insert_text(pasted)  # as if pasted; `fill` ignores what the box allows
        expect(visit.page.get_by_label(label)).to_have_value(pasted)
    visit.press("Start")
    expect(visit.page.get_by_role("alert")).to_contain_text("at most 100 choices, got 1,000")
    assert visit.served.service.num_asked == asked
    expect(visit.page.locator("#batch-start")).to_be_visible()


def test_a_batch_waits_for_a_slow_upload_and_files_are_added_and_removed_one_by_one(visit: Visit) -> None:
    add(visit, RING)
    files = visit.page.locator("#batch-files")
    expect(files.get_by_text("Drop pictures")).to_have_count(1)
    with visit.slow_uploads():
        visit.bring(
            "drop", {"name": "notes.txt", "buffer": b"x" * 1_500_000}, STAR, {"name": "bad.png", "buffer": b"bad"}
        )
        expect(files).to_contain_text(re.compile("[1-9][0-9]?%"))
        visit.page.get_by_role("button", name="Start").click()
        expect(visit.page.get_by_text("The batch waits for the upload")).to_be_visible()
        visit.screenshot("batch-slow-upload")
    expect(finished(visit)).to_contain_text("4 of 4 pictures")
    expect(visit.page.locator("#batch-failed li strong")).to_have_text(["notes.txt", "bad.png"])
    expect(visit.page.get_by_text("The batch waits")).to_have_count(0)

    files.locator("summary").click()
    files.get_by_role("button", name="Remove notes.txt").click()
    expect(files.locator("li")).to_have_count(3)
    expect(files.get_by_role("button", name="Remove bad.png")).to_be_visible()
    visit.bring("drop", RING, {"name": "bad.png", "buffer": b"bad"})  # they are there already
    expect(files.locator("summary")).to_have_text("3 files")


def test_cancelling_keeps_the_answers_so_far(visit: Visit, served: ServedPage) -> None:
    add(visit, *SAMPLES)
    served.gate.close()
    ask(visit, "Is there a red star?", "yes, no")
    running = visit.page.locator("#batch-progress [data-state=running]")
    expect(visit.page.locator(".la-decision").first).to_be_visible()
    expect(running).to_contain_text(f"of {len(SAMPLES)} pictures")
    expect(running.get_by_role("progressbar")).not_to_have_attribute("aria-valuenow", "0")
    expect(visit.page.locator("#batch-start")).to_have_count(0)
    visit.page.locator("#batch-cancel").click()
    wait_for(lambda: served.service.status().num_waiting == 0)
    served.gate.open()
    finished(visit, "cancelled")

    lines = records(visit)
    assert 0 < len(lines) < len(SAMPLES)
    assert all(line["error"] is None for line in lines)
    expect(visit.page.locator("#batch-cards li")).to_have_count(len(lines))
    expect(visit.page.locator("#batch-start")).to_be_visible()
