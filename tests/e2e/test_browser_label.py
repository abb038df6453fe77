"""`llama-adapter label` as a process, and a real browser in which pictures are labelled by keyboard."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.serving.server_process import ServerProcess
from tests.app.serving.web.browser import SAMPLES, Browser, expect, is_in_window

pytestmark = pytest.mark.slow

COLOURS = ["red", "blue", "green", "yellow", "purple", "black", "white", "orange"]
NUM_PICTURES = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with 12 pictures, and a file that is none."""
    for path in SAMPLES[:NUM_PICTURES]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "broken.jpg").write_bytes(SAMPLES[3].read_bytes()[:500])
    return tmp_path


class Labeller:
    def __init__(self, browser: Browser, server: ServerProcess) -> None:
        self.page = browser.new_page(width=1280, height=800, dark=False)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda one: self.complaints.append(one.text) if one.type == "error" else None)
        self.page.goto(server.url)
        self.page.locator(".la-label").wait_for()

    @property
    def name(self) -> str:
        return Path(self.page.locator(".la-label figcaption").inner_text()).name

    @property
    def colour(self) -> str:
        """The right label of the picture: the first colour in its name."""
        return self.name.split("-")[1]

    def press(self, key: str) -> None:
        """Press a key, and wait for the next picture."""
        before = self.page.locator(".la-label").get_attribute("data-picture")
        self.page.keyboard.press(key)
        expect(self.page.locator(".la-label")).not_to_have_attribute("data-picture", before)

    def label(self) -> str:
        """Label the picture that is shown by its number; returns its name."""
        name = self.name
        self.press(str(COLOURS.index(self.colour) + 1))
        return name


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = (str(folder), "--choices", ",".join(COLOURS), "--out", str(folder / "labels.csv"))
    with ServerProcess(*flags, command=("-m", "llama_adapter", "label")) as server:
        yield server


def rows(folder: Path) -> list[dict[str, Any]]:
    with (folder / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_pictures_are_labelled_by_keyboard(browser: Browser, folder: Path, server: ServerProcess) -> None:
    labeller = Labeller(browser, server)
    page, count = labeller.page, labeller.page.locator(".la-label-count")
    names = [labeller.label() for _ in range(3)]
    assert [row["picture"] for row in rows(folder)] == names

    labeller.press("u")
    assert (labeller.name, len(rows(folder))) == (names[2], 2)
    page.reload()
    expect(count).to_contain_text("2 / 13 labelled")
    assert labeller.name == names[2], "a reload shows the same picture"
    expect(page.locator("[data-proposed]")).to_have_count(1)
    proposed = page.locator("[data-proposed] > span").inner_text()
    labeller.press("Enter")
    assert rows(folder)[2] == {"picture": names[2], "label": proposed}
    labeller.press("Backspace")
    labeller.label()
    page.set_viewport_size({"width": 390, "height": 844})
    assert is_in_window(labeller, ".la-label figure"), "on a phone"
    assert is_in_window(labeller, "[data-action=accept]"), "on a phone"
    page.get_by_role("button", name=labeller.colour, exact=False).first.click()
    expect(count).to_contain_text("4 / 13")
    expect(page.locator(".la-label figure")).to_be_focused()
    skipped = labeller.name
    labeller.press("s")
    expect(count).to_contain_text("1 skipped")
    pressed = (
        ("ы", "KeyS", "2 skipped"),
        ("&", "Digit1", "5 / 13"),
        ("г", "KeyU", "4 / 13"),
        ("г", "KeyU", "1 skipped"),
    )
    for key, code, told in pressed:  # on a Russian and on a French keyboard
        options = {"key": key, "code": code, "bubbles": True}
        page.evaluate("(options) => document.body.dispatchEvent(new KeyboardEvent('keydown', options))", options)
        expect(count).to_contain_text(told)

    while page.locator(".la-label").get_attribute("data-picture"):
        labeller.label()
    expect(page.get_by_text("1 picture passed over")).to_be_visible()
    expect(page.locator(".la-label")).to_contain_text("11 / 13 labelled")
    assert labeller.complaints == []
    page.close()
    server.terminate()
    assert server.wait(timeout_s=60) == 0
    named = {row["picture"]: row["label"] for row in rows(folder)}
    assert named == {path.name: path.name.split("-")[1] for path in SAMPLES[:NUM_PICTURES] if path.name != skipped}
