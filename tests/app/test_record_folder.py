"""A folder of record files is written as one file would be: whole, locked, and never from its middle."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.record_folder import RecordFolder, is_record_folder, parts_of, read_folder_lines
from app.records.file import RecordFileLockedError
from app.records.record import Record, RecordFileError, read_records
from tests.app.recorded import FakeAnswer, recorded


def records(number: int) -> list[Record]:
    return [recorded(replace(FakeAnswer(), picture=f"{index}.png")) for index in range(number)]


def write(folder: Path, written: list[Record], *, records_per_part: int = 4) -> None:
    with RecordFolder(folder, records_per_part=records_per_part) as file:
        for record in written:
            file.write(record)


def pictures_in(folder: Path) -> list[str]:
    return [record["picture"] for _, _, record in read_folder_lines(folder)]


def test_a_part_that_is_full_is_followed_by_another(tmp_path: Path) -> None:
    write(tmp_path / "out", records(10))

    assert [part.name for part in parts_of(tmp_path / "out")] == [f"part-0000{number}.jsonl" for number in range(3)]
    assert [len(list(read_records(part))) for part in parts_of(tmp_path / "out")] == [4, 4, 2]
    assert pictures_in(tmp_path / "out") == [f"{index}.png" for index in range(10)]


def test_a_further_run_goes_on_in_the_last_part(tmp_path: Path) -> None:
    everything = records(10)
    write(tmp_path / "out", everything[:5])
    first, last = parts_of(tmp_path / "out")
    full = first.stat()
    with open(last, "ab") as file:
        file.write(b'{"id": "torn')

    write(tmp_path / "out", everything[5:])

    assert pictures_in(tmp_path / "out") == [f"{index}.png" for index in range(10)]
    assert [len(list(read_records(part))) for part in parts_of(tmp_path / "out")] == [4, 4, 2]
    assert first.stat().st_mtime_ns == full.st_mtime_ns


def test_a_record_is_found_at_its_offset(tmp_path: Path) -> None:
    write(tmp_path / "out", records(6))

    for part, offset, record in read_folder_lines(tmp_path / "out"):
        assert f'"picture": "{record["picture"]}"'.encode() in part.read_bytes()[offset:].splitlines()[0]


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with RecordFolder(tmp_path / "out"), pytest.raises(RecordFileLockedError, match="out"):
        RecordFolder(tmp_path / "out")

    RecordFolder(tmp_path / "out").close()


def test_begun_anew_nothing_of_before_is_left_and_other_files_are(tmp_path: Path) -> None:
    write(tmp_path / "out", records(10))
    (tmp_path / "out" / "notes.jsonl").write_text("mine\n")

    with RecordFolder(tmp_path / "out", records_per_part=4) as file:
        file.clear()
        file.write(records(1)[0])

    assert pictures_in(tmp_path / "out") == ["0.png"]
    assert (tmp_path / "out" / "notes.jsonl").read_text() == "mine\n"


def test_a_folder_that_stays_empty_is_removed_if_it_was_made_here(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()

    RecordFolder(tmp_path / "new").close()
    RecordFolder(tmp_path / "there").close()

    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert list((tmp_path / "there").iterdir()) == []


def test_a_part_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "part-00000.jsonl").write_text("no record\n")

    with pytest.raises(RecordFileError, match=r"part-00000\.jsonl"):
        RecordFolder(tmp_path)

    assert (tmp_path / "part-00000.jsonl").read_text() == "no record\n"
    with pytest.raises(RecordFileError):  # and nobody holds the lock
        RecordFolder(tmp_path)


def test_a_folder_is_meant_where_there_is_one_or_the_name_says_so(tmp_path: Path) -> None:
    assert is_record_folder(tmp_path)
    assert is_record_folder(f"{tmp_path}/new/")
    assert not is_record_folder(f"{tmp_path}/new.jsonl")


def test_parts_without_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records_per_part"):
        RecordFolder(tmp_path, records_per_part=0)
