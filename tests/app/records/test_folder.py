"""Records in a folder of files."""

from pathlib import Path

import pytest

from llama_adapter.app.records.file import RecordFileLockedError, RecordWriter
from llama_adapter.app.records.folder import RecordFolder, open_records
from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.manifest import manifest_path
from llama_adapter.app.records.record import RecordFileError, read_records
from tests.app.recorded import FakeAnswer, recorded


def write(folder: Path, *texts: str) -> None:
    with RecordFolder(folder, records_in_a_part=2) as records:
        for text in texts:
            records.write(recorded(FakeAnswer(text=text, picture=text)))


def parts(folder: Path) -> dict[str, list[str]]:
    return {path.name: [record["text"] for record in read_records(path)] for path in sorted(folder.glob("*.jsonl"))}


def test_a_part_that_is_full_is_followed_by_the_next_also_in_later_runs(tmp_path: Path) -> None:
    write(tmp_path / "out", "a", "b", "c")
    write(tmp_path / "out", "d", "e")

    assert parts(tmp_path / "out") == {
        "part-00000.jsonl": ["a", "b"],
        "part-00001.jsonl": ["c", "d"],
        "part-00002.jsonl": ["e"],
    }


def test_the_last_part_is_mended_and_goes_on(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    with open(tmp_path / "part-00001.jsonl", "ab") as file:
        file.write(b'{"id": "half')

    write(tmp_path, "d")

    assert parts(tmp_path) == {"part-00000.jsonl": ["a", "b"], "part-00001.jsonl": ["c", "d"]}


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with RecordFolder(tmp_path), pytest.raises(RecordFileLockedError, match="Another run is writing"):
        RecordFolder(tmp_path)
    RecordFolder(tmp_path).close()


def test_what_earlier_runs_wrote_is_found_in_all_parts(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")

    with RecordFolder(tmp_path) as records:
        index = RecordIndex(records.files)

    record_id = recorded()["id"]
    assert [index.claim(record_id, name) for name in ("a", "c", "b", "b")] == ["answered"] * 3 + [None]


def test_a_name_elsewhere_is_looked_up_in_its_own_part(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", str(tmp_path / "c"))

    assert RecordIndex(sorted(tmp_path.glob("*.jsonl"))).claim(recorded()["id"], "renamed") == "answered"


def test_a_folder_that_is_cleared_begins_anew(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    with RecordFolder(tmp_path) as records:
        records.clear()
        records.write(recorded(FakeAnswer(text="d")))

    assert parts(tmp_path) == {"part-00000.jsonl": ["d"]}


def test_parts_that_hold_something_else_are_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "part-00000.jsonl"
    precious.write_text("not ours\n")

    with pytest.raises(RecordFileError, match="line 1 is not a record"):
        RecordFolder(tmp_path)
    assert precious.read_text() == "not ours\n"
    precious.unlink()
    RecordFolder(tmp_path).close()  # the failed one left no lock


def test_a_folder_that_got_no_record_does_not_stay_unless_it_was_there_before(tmp_path: Path) -> None:
    RecordFolder(tmp_path / "new").close()
    (tmp_path / "old").mkdir()
    RecordFolder(tmp_path / "old").close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_a_slash_or_a_folder_that_is_there_means_a_folder(tmp_path: Path) -> None:
    with open_records(f"{tmp_path}/new/") as by_slash, open_records(str(tmp_path)) as by_itself:
        assert isinstance(by_slash, RecordFolder)
        assert isinstance(by_itself, RecordFolder)
    with open_records(str(tmp_path / "file")) as file:
        assert isinstance(file, RecordWriter)


def test_the_manifest_of_a_folder_lies_in_it(tmp_path: Path) -> None:
    assert manifest_path(tmp_path) == tmp_path / "manifest.json"
