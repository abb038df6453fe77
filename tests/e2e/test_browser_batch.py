"""Batch and Throughput in a real browser: many pictures, zips, folders, broken files, cancelling, downloads."""

import csv
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.models.resources import sample_pictures
from tests.app.web.held_engine import HeldEngine
from tests.e2e.browser import Browser, ServedPage, Visit, serve_page

pytestmark = pytest.mark.slow

SAMPLES = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
MOON = "a small yellow moon above a small green cross"  # the first sample
HOSTILE = "<img src=x onerror=alert(1)> ${alert(2)} {{3}}.png"


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def open_page(served: ServedPage, **window: Any) -> Visit:
        visits.append(Visit(browser, served, **window))
        visits[-1].open_tab("Batch")
        return visits[-1]

    yield open_page
    for visit in visits:
        visit.close()
        assert visit.foreign_requests() == [], "the page asked somebody else"
        assert visit.complaints == []


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)


def add(visit: Visit, *files: Any) -> None:
    """Pictures, as paths or as dictionaries with name and bytes; returns when all are uploaded."""
    visit.page.locator("#batch-files input[type=file]").set_input_files(list(files))
    expect(visit.page.locator("#batch-files .file")).to_have_count(len(files))


def start(visit: Visit) -> None:
    visit.page.locator("#batch-start").click()


def finished(visit: Visit, state: str = "done") -> Any:
    progress = visit.page.locator(f"#batch-progress [data-state={state}]")
    expect(progress).to_be_visible(timeout=30_000)
    return progress


def download(visit: Visit, button: str) -> bytes:
    with visit.page.expect_download() as caught:
        visit.page.locator(button).click()
    path = caught.value.path()
    assert path is not None
    return Path(path).read_bytes()


def records(visit: Visit) -> list[dict[str, Any]]:
    return [json.loads(line) for line in download(visit, "#batch-download-jsonl").splitlines()]


def zipped(tmp_path: Path) -> Path:
    path = tmp_path / "more.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for sample in SAMPLES[10:14]:
            archive.write(sample, f"shapes/{sample.name}")
        archive.writestr("notes.txt", "no picture")
        archive.writestr("__MACOSX/._x.png", "hidden")
        archive.writestr("../out.png", SAMPLES[5].read_bytes())
    return path


def test_pictures_a_zip_and_a_corrupt_file_are_answered_shown_and_taken_away(
    served: ServedPage, open_page: Callable[..., Visit], tmp_path: Path
) -> None:
    visit = open_page(served)
    expect(visit.page.locator("#batch-progress")).to_contain_text("No pictures yet")
    for suffix in ("jsonl", "csv", "zip"):
        expect(visit.page.locator(f"#batch-download-{suffix}")).to_be_disabled()
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(SAMPLES[3].read_bytes()[:500])
    add(visit, *SAMPLES[:8], broken, zipped(tmp_path))
    start(visit)

    progress = finished(visit)
    expect(progress).to_contain_text("14 of 14 pictures")
    expect(progress).to_contain_text("1 failed")
    expect(progress).to_contain_text("pictures/s")
    expect(progress).to_contain_text("passed over 1 file that is no picture, 1 hidden file")
    expect(visit.page.locator("#batch-cards figure")).to_have_count(13)
    expect(visit.page.locator("#batch-cards figure").first).to_contain_text(MOON)
    assert visit.page.locator("#batch-cards img").evaluate_all("all => all.every(one => one.naturalWidth == 160)")
    bad = visit.page.locator("#batch-table tbody tr").first
    expect(bad).to_contain_text("broken.jpg")
    expect(bad).to_contain_text("truncated")
    visit.screenshot("batch")

    lines = records(visit)
    assert [line["picture"] for line in lines][-5:] == [*(f"shapes/{path.name}" for path in SAMPLES[10:14]), "out.png"]
    assert (lines[0]["text"], lines[8]["error"]["code"]) == (MOON, "truncated")
    table = list(csv.DictReader(io.StringIO(download(visit, "#batch-download-csv").decode("utf-8-sig"))))
    assert [row["text"] for row in table] == [line["text"] for line in lines]
    with zipfile.ZipFile(io.BytesIO(download(visit, "#batch-download-zip"))) as sidecars:
        assert sidecars.read("01-yellow-moon-green-cross.txt").decode() == MOON + "\n"
        assert sidecars.read("failed.txt").startswith(b"broken.jpg: truncated")
        assert len(sidecars.namelist()) == 14


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_window(
    served: ServedPage, open_page: Callable[..., Visit], tmp_path: Path, dark: bool
) -> None:
    visit = open_page(served, width=390, height=844, dark=dark)
    long_name = tmp_path / f"{'x' * 150}.png"
    long_name.write_bytes(b"no picture")
    add(visit, *SAMPLES[:3], long_name)
    start(visit)
    finished(visit)
    expect(visit.page.locator("#batch-table")).to_contain_text("not_a_picture")
    assert visit.overflow() == 0
    visit.screenshot(f"batch-phone-{'dark' if dark else 'light'}")


def test_a_folder_is_taken_with_its_pictures_only(
    served: ServedPage, open_page: Callable[..., Visit], tmp_path: Path
) -> None:
    for sample in SAMPLES[:2]:
        (tmp_path / sample.name).write_bytes(sample.read_bytes())
    (tmp_path / "notes.txt").write_text("no picture")
    visit = open_page(served)
    with visit.page.expect_file_chooser() as chooser:
        visit.page.locator("#batch-folder").click()
    chooser.value.set_files(tmp_path)
    expect(visit.page.locator("#batch-folder-line")).to_have_text("Folder: 3 files")
    start(visit)
    expect(finished(visit)).to_contain_text("2 of 2 pictures")
    expect(visit.page.locator("#batch-progress")).to_contain_text("passed over 1 file that is no picture")

    visit.page.locator("#batch-clear").click()
    expect(visit.page.locator("#batch-progress")).to_contain_text("No pictures yet")
    expect(visit.page.locator("#batch-folder-line")).to_have_text("")
    expect(visit.page.locator("#batch-cards figure")).to_have_count(0)
    expect(visit.page.locator("#batch-download-jsonl")).to_be_disabled()


def test_choices_give_probabilities_and_the_keyboard_starts_the_run(
    served: ServedPage, open_page: Callable[..., Visit]
) -> None:
    visit = open_page(served)
    add(visit, SAMPLES[11], SAMPLES[12])
    visit.page.get_by_label("Instruction or question").fill("Is there a red star?")
    visit.page.get_by_label("Choices (optional)").fill("yes, no")
    visit.page.locator("#batch-start").focus()
    visit.page.keyboard.press("Enter")
    finished(visit)

    assert [line["text"] for line in records(visit)] == ["yes", "no"]
    assert [sum(line["choice"].values()) for line in records(visit)] == [pytest.approx(1.0)] * 2
    expect(visit.page.locator("#batch-cards figure").first).to_contain_text("yes (100%)")


def test_mistakes_are_told_and_nothing_is_asked(served: ServedPage, open_page: Callable[..., Visit]) -> None:
    visit = open_page(served)
    start(visit)
    expect(visit.page.get_by_role("alert")).to_contain_text("Add pictures, a folder or a zip first")
    add(visit, SAMPLES[0])
    visit.page.get_by_label("Choices (optional)").fill("only one")
    start(visit)
    expect(visit.page.get_by_role("alert")).to_contain_text("two to twelve different choices")
    expect(visit.page.locator("#batch-start")).to_be_enabled()


def test_a_file_name_is_text_and_never_part_of_the_page(served: ServedPage, open_page: Callable[..., Visit]) -> None:
    visit = open_page(served)
    dialogs: list[Any] = []
    visit.page.on("dialog", lambda dialog: dialogs.append(dialog))
    add(
        visit, *({"name": HOSTILE, "mimeType": "image/png", "buffer": data} for data in (SAMPLES[0].read_bytes(), b"x"))
    )
    start(visit)
    finished(visit)

    expect(visit.page.locator("#batch-table tbody tr").nth(1)).to_contain_text(HOSTILE)
    expect(visit.page.locator("#batch-cards figure")).to_contain_text(HOSTILE)
    assert visit.page.locator("img[src='x']").count() == 0
    assert dialogs == []


def test_cancelling_keeps_what_is_done(open_page: Callable[..., Visit]) -> None:
    engine = HeldEngine(hold_after=3)
    with serve_page(load=engine.load) as served:
        visit = open_page(served)
        add(visit, *SAMPLES)
        start(visit)
        assert engine.is_held.wait(60)
        running = visit.page.locator("#batch-progress [data-state=running]")
        expect(running).to_contain_text(f"of {len(SAMPLES)} pictures")
        expect(running.get_by_role("progressbar")).not_to_have_attribute("aria-valuenow", "0")
        expect(running).to_contain_text("left")
        expect(visit.page.locator("#batch-start")).to_be_disabled()
        visit.screenshot("batch-running")
        visit.page.locator("#batch-cancel").click()
        until(lambda: served.service.status().num_waiting == 0)  # those that wait go at once, the rest with the engine
        engine.open()
        progress = finished(visit, "cancelled")
        expect(progress).to_contain_text("What is done is kept")

        lines = records(visit)
        assert 3 <= len(lines) < len(SAMPLES)
        assert all(line["error"] is None for line in lines)
        expect(visit.page.locator("#batch-table tbody tr")).to_have_count(len(lines))
        expect(visit.page.locator("#batch-start")).to_be_enabled()
        assert served.service.wait_until_idle(30)
        visit.close()  # before its server ends, which it would miss


def test_whoever_closes_the_page_leaves_nothing_under_way_and_makes_room(
    browser: Browser, open_page: Callable[..., Visit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_adapter.app.web.batch.MAX_RUNS_AT_ONCE", 1)
    engine = HeldEngine(hold_after=0)
    with serve_page(load=engine.load) as served:
        visit = Visit(browser, served)
        visit.open_tab("Batch")
        add(visit, *SAMPLES)
        start(visit)
        assert engine.is_held.wait(60)
        until(lambda: served.service.status().num_waiting > 0)
        other = open_page(served)
        add(other, SAMPLES[0])
        start(other)
        expect(other.page.get_by_role("alert")).to_contain_text("no more run at once")

        visit.close()
        until(lambda: served.service.status().num_waiting == 0)
        engine.open()
        assert served.service.wait_until_idle(30)
        start(other)
        expect(finished(other)).to_contain_text("1 of 1 pictures")
        other.close()


def test_runs_and_measurements_are_plotted_and_taken_away(
    served: ServedPage, open_page: Callable[..., Visit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_adapter.app.web.measuring.SECONDS_EACH", 0.2)
    visit = open_page(served)
    add(visit, *SAMPLES[:4])
    start(visit)
    finished(visit)
    visit.open_tab("Throughput")
    report = visit.page.locator("#throughput-report")
    expect(report).to_contain_text("Last run: Batch")
    visit.page.locator("#throughput-measure").click()
    expect(visit.page.locator("#throughput-notice")).to_have_text("Measured.", timeout=30_000)

    expect(report).to_contain_text("Last run: Measure")
    expect(report.get_by_role("img", name="Stage times: 1 in flight: read")).to_be_visible()
    expect(report.get_by_role("img", name="Pictures/s: 1 in flight")).to_be_visible()
    runs = json.loads(download(visit, "#throughput-download"))["runs"]
    assert [(run["kind"], run["in_flight"]) for run in runs[-4:]] == [
        ("batch", 4),
        ("measure", 1),
        ("measure", 5),
        ("measure", 16),
    ]
    assert report.locator("tbody tr").count() == len(runs)
    visit.screenshot("throughput")
    visit.page.set_viewport_size({"width": 390, "height": 844})
    assert visit.overflow() == 0
    visit.screenshot("throughput-phone")


def until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Wait for what another thread does on its own."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
