"""Pictures as people have them: everything that a viewer shows is answered, and what is no picture is named."""

import json
from pathlib import Path

import pytest

from tests.app.command import Run

HERE = Path(__file__).parent
RED, BLACK = "a large red circle at the left", "a large black circle at the left"
ANSWERED = {
    "odd-files2/text-large.png": RED,  # 1.2 MB of compressed text
    "odd-files2/cut1.webp": RED,  # cut in the byte of padding
    "transparent/red-palette.gif": RED,
    "transparent/red-palette.png": RED,
    "transparent/red-rgba.png": RED,
    "transparent/red-rgba.webp": RED,
    "transparent/black-la.png": BLACK,
    "transparent-equal/red-on-white.png": RED,  # its twins above look the same
    "transparent-equal/black-on-white.png": BLACK,
}
REFUSED = {
    "odd-files/pointer.jpg": "is a pointer of Git LFS in place of the picture",
    "odd-files2/err.jpg": "looks like JSON; it may be an error message of a server",
    "odd-files2/xml.jpg": "looks like XML; it may be an error message of a server",
}


@pytest.mark.slow
def test_pictures_are_answered_as_they_look_and_others_are_named(run: Run) -> None:
    ran = run("caption", [str(HERE / name) for name in (*ANSWERED, *REFUSED)], "--format", "jsonl")

    records = [json.loads(line) for line in ran.out.splitlines()]
    found = {record["picture"].removeprefix(f"{HERE}/"): record for record in records}
    assert {name: record["text"] for name, record in found.items() if not record["error"]} == ANSWERED
    for name, words in REFUSED.items():
        assert found[name]["error"]["code"] == "not_a_picture"
        assert words in found[name]["error"]["message"]
    assert len(found) == len(ANSWERED) + len(REFUSED)
