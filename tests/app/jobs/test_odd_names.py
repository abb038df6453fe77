"""Names that Python calls unprintable: from folders to exports and back, and in records of an earlier run."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from llama_adapter.app.jobs.records.record import read_records
from tests.app.command import Run
from tests.app.golden import model_flags, picture

ORDINARY = ("Shot 9.41\u202fAM.jpg", "a\u00a0b.jpg", "全角\u3000名.jpg", "می\u200cخواهم.jpg", "👨\u200d👩\u200d👧.jpg")
HOSTILE = ("line\nbreak.jpg", "tab\there.jpg", "esc\x1b[31m.jpg", "\u202egnp.jpg")
RAW, LITERAL = os.fsdecode(b"inv\xff\xfe\x80.jpg"), r"inv\xff\xfe\x80.jpg"
NAMES = (*ORDINARY, *HOSTILE, RAW, LITERAL)
COMMON = [*model_flags(), "--max-new-tokens", "4"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder.

    `pictures` has a picture with each name; the raw and the literal name have different pictures.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for name in NAMES:
        source = "noise_128x96.png" if name == RAW else "shapes_200x300.jpg"
        shutil.copy(picture(source), tmp_path / "pictures" / name)
    return tmp_path


def test_records_and_all_exports_have_the_true_names_and_a_second_run_has_nothing_to_do(run: Run, folder: Path) -> None:
    assert run("caption", "pictures", *COMMON, "--out", "a.jsonl").code == 0
    before = Path("a.jsonl").read_bytes()
    texts = {os.path.basename(one["picture"]): one["text"] for one in read_records("a.jsonl")}
    assert sorted(texts) == sorted(NAMES)

    ran = run("caption", "pictures", *COMMON, "--out", "a.jsonl")
    assert (ran.code, Path("a.jsonl").read_bytes()) == (0, before)

    assert run("export-records", "a.jsonl", "--to", "sidecars").code == 0
    for name in NAMES:
        assert (folder / "pictures" / name).with_suffix(".txt").read_text() == texts[name] + "\n"
    assert run("export-records", "a.jsonl", "--to", "jsonl", "--out", "b.jsonl").code == 0
    assert list(read_records("b.jsonl")) == list(read_records("a.jsonl"))
    assert run("export-records", "a.jsonl", "--to", "csv", "--out", "a.csv").code == 0
    rows = list(csv.DictReader(io.StringIO(Path("a.csv").read_bytes().decode("utf-8-sig"), newline="")))
    in_csv = {*NAMES, r"inv\udcff\udcfe\udc80.jpg"} - {RAW}
    assert {os.path.basename(row["picture"]) for row in rows} == in_csv
    refused = run("export-records", "a.jsonl", "--to", "metadata", "--out", "pictures")
    assert (refused.code, r"inv\xff\xfe\x80.jpg: its name is not UTF-8" in refused.err) == (1, True)
    lines = Path("pictures/metadata.jsonl").read_text().splitlines()
    assert {json.loads(line)["file_name"] for line in lines} == {*NAMES} - {RAW}


def test_text_for_people_has_a_line_for_each_picture_with_nothing_that_a_terminal_acts_on(
    run: Run, folder: Path
) -> None:
    lines = run("caption", "pictures", *COMMON, "--format", "text").out.removesuffix("\n").split("\n")

    assert len(lines) == len(NAMES)
    shown = {os.path.basename(line.partition(": ")[0]) for line in lines}
    assert shown == {*ORDINARY, r"line\nbreak.jpg", r"tab\there.jpg", r"esc\x1b[31m.jpg", r"\u202egnp.jpg", LITERAL}


def test_prompts_are_asked_with_the_true_name(run: Run, folder: Path) -> None:
    ran = run("caption", "pictures", *COMMON, "--prompt", "What is {stem}?")

    asked = {os.path.basename(one["picture"]): one["prompt"] for one in ran.records}
    assert asked["Shot 9.41\u202fAM.jpg"] == "What is Shot 9.41\u202fAM?"
    assert asked["line\nbreak.jpg"] == "What is line\nbreak?"
    assert asked[RAW] == r"What is inv\xff\xfe\x80?"  # a prompt is text, and the model reads UTF-8


def test_records_of_an_earlier_run_are_still_found(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first begins with another key. The third has `exact_name`, which earlier versions wrote: it is ignored."""
    # Of the golden files when the records were written: a digest of a checkpoint includes the times of its files.
    digest = "04574909292f3cccbc0886d1744e420080729f23b94cfc90bcba41d975b6502f"
    monkeypatch.setattr("llama_adapter.app.models.checkpoints.digest_of", lambda *_: digest)
    shutil.copy(Path(__file__).with_name("old_records.jsonl"), "old.jsonl")
    before = Path("old.jsonl").read_bytes()

    ran = run("caption", *(f"pictures/{name}" for name in (ORDINARY[0], RAW, LITERAL)), *COMMON, "--out", "old.jsonl")

    assert "0 pictures answered, 3 answered by an earlier run" in ran.err
    assert Path("old.jsonl").read_bytes() == before
