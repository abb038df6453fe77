"""Exports are complete and safe to open."""

import csv
import io
import json
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.jobs.exports import formats
from llama_adapter.app.jobs.exports.formats import (
    FAILED_NAME,
    OTHER_NAMES,
    defused,
    safe_path,
    to_csv,
    to_jsonl,
    to_sidecars,
)
from llama_adapter.app.jobs.records.record import Record
from tests.app.recorded import failed, recorded

SAFE_NAMES = yaml.safe_load(Path(__file__).with_name("safe_names.yaml").read_text())


def record(picture: str = "a.png", text: str = "a red star", **changes: Any) -> Record:
    return recorded(id="0" * 32, picture=picture, text=text, ms={"total": 12.5}, **changes)


def rows(table: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(table.decode("utf-8-sig"), newline="")))


def members(packed: bytes) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_json_lines_hold_every_record_unchanged() -> None:
    records = [record(text="=1+1\nzwei “Zeilen”"), failed(picture="b.png")]

    assert [json.loads(line) for line in to_jsonl(records).decode().splitlines()] == records


# The table


def test_the_table_has_a_row_for_each_record_with_reason_and_figures() -> None:
    name = 'a",=1+1,"\r\n=2+2,b.png'  # it cannot leave its cell
    head, first, second = rows(to_csv([record(name, unfamiliar=False), failed(picture="b.png")]))

    assert dict(zip(head, first, strict=True)) == {
        "picture": name,
        "text": "a red star",
        "finish": "stop",
        "unfamiliar": "False",
        "tokens": "3",
        "ms": "12.5",
        "error": "",
        "reason": "",
        "prompt": "What is it?",
        "id": "0" * 32,
        "run": "run-1",
    }
    assert dict(zip(head, second, strict=True))["reason"] == "It is cut off."


def test_each_choice_has_a_column_and_records_without_it_leave_it_empty() -> None:
    head, first, second = rows(to_csv([record(text="=1", choice={"=1": 0.75, "no": 0.25}), failed(picture="b.png")]))

    assert head[-2:] == ["probability of =1", "probability of no"]  # no formula as a heading
    assert (first[-2:], second[-2:]) == (["0.75", "0.25"], ["", ""])


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "  =", "\u00a0@"])
def test_what_a_spreadsheet_would_compute_gets_an_apostrophe(start: str) -> None:
    formula = f"{start}cmd|' /C calc'!A0"
    head, row = rows(to_csv([record(picture=formula, text=formula, prompt=formula)]))

    cells = dict(zip(head, row, strict=True))
    assert cells["picture"] == cells["text"] == cells["prompt"] == f"'{formula}"


@given(st.text())
def test_no_cell_begins_a_formula_and_ordinary_text_stays(text: str) -> None:
    cell = defused(text)

    assert cell.lstrip()[:1] not in tuple("=+-@＝＋－＠")
    assert cell in (text, "'" + text)


# Text files


def test_each_answer_is_in_a_file_named_after_its_picture_and_failures_are_listed_with_their_reasons() -> None:
    records = [record("b.jpg", "one"), record("cats/b.png", "t\n\nwo"), failed(picture="cats/c.png")]
    packed = members(to_sidecars(records))

    assert to_sidecars(records) == to_sidecars(records)
    reason = "cats/c.png: truncated: It is cut off.\n"
    assert packed == {"b.txt": "one\n", "cats/b.txt": "t wo\n", FAILED_NAME: reason}


def test_equal_names_become_different_files_also_where_case_does_not_count() -> None:
    names = ["a.png", "A.jpg", "a.png", "a.txt/b.png", "failed.png"]
    packed = members(
        to_sidecars([*(record(name, str(number)) for number, name in enumerate(names)), failed(picture="x")])
    )

    assert len(packed) == len(names) + 2
    assert packed[OTHER_NAMES] == "a.png: a.png.txt\nA.jpg: A.jpg.txt\na.png: a (2).txt\n"
    assert len({name.casefold() for name in packed}) == len(packed)
    folders = {str(parent) for name in packed for parent in PurePosixPath(name).parents}
    assert not folders & packed.keys()  # otherwise unpacking would need a folder in place of a file


def test_a_thousand_equal_names_are_told_apart_by_a_few_thousand_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(formats, "name_key", lambda name: (asked.append(name), hash(name))[1])
    names = formats.SidecarNames()

    assert len({names.take("a.png") for _ in range(1000)}) == 1000
    assert len(asked) < 10_000


@pytest.mark.parametrize(("name", "safe"), SAFE_NAMES.items())
def test_names_are_made_safe_for_any_system(name: str, safe: str) -> None:
    assert safe_path(name) == safe


@given(st.text(max_size=400))
def test_no_name_leads_out_of_the_folder_or_is_too_long(name: str) -> None:
    parts = safe_path(name).split("/")

    assert all(part not in ("", ".", "..") and len(part.encode()) < 250 for part in parts)
    assert not set(safe_path(name)) & set('\\<>:"|?*\0')


def test_lone_surrogates_are_written_as_escapes() -> None:
    assert members(to_sidecars([record("a.png", "half \ud800")])) == {"a.txt": "half \\ud800\n"}
    assert "\\ud800" in to_csv([record(text="\ud800")]).decode("utf-8-sig")
