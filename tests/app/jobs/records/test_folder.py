"""Records in a folder of parts: how `--out FOLDER/` reads and continues them."""

from pathlib import Path

import pytest

from llama_adapter.app.jobs.records.file import RecordWriter, open_records
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.manifest import manifest_path
from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.runtime.record_lines import RecordFileError
from tests.app.recorded import recorded


def write(path: Path, *texts: str) -> None:
    with RecordWriter(path) as records:
        for text in texts:
            records.write(recorded(text=text, picture=text))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two parts, as written by earlier versions."""
    write(tmp_path / "out" / "part-00000.jsonl", "a", "b")
    write(tmp_path / "out" / "part-00001.jsonl", "c")
    (tmp_path / "out" / ".lock").touch()
    return tmp_path / "out"


def parts(folder: Path) -> dict[str, list[str]]:
    return {path.name: [record["text"] for record in read_records(path)] for path in sorted(folder.glob("*.jsonl"))}


def test_all_parts_are_read_and_the_last_one_is_mended_and_goes_on(folder: Path) -> None:
    with open(folder / "part-00001.jsonl", "ab") as file:
        file.write(b'{"id": "half')

    with open_records(str(folder)) as records:
        index = RecordIndex(records.files)
        records.write(recorded(text="d"))

    assert records.repair == "dropped"
    claims = [index.claim(recorded()["id"], name) for name in "acbb"]
    assert [claim and claim.state for claim in claims] == ["answered"] * 3 + [None]
    assert parts(folder) == {"part-00000.jsonl": ["a", "b"], "part-00001.jsonl": ["c", "d"]}


def test_a_cleared_folder_starts_over(folder: Path) -> None:
    with open_records(str(folder)) as records:
        records.clear()
        records.write(recorded(text="d"))

    assert parts(folder) == {"part-00001.jsonl": ["d"]}
    assert RecordIndex(records.files)


def test_parts_that_hold_something_else_are_left_alone(folder: Path) -> None:
    precious = folder / "part-00000.jsonl"
    precious.write_text("not ours\n")

    with open_records(str(folder)) as records, pytest.raises(RecordFileError):
        records.clear()
    assert precious.read_text() == "not ours\n"


def test_a_slash_or_a_folder_that_exists_means_a_folder_with_its_manifest_in_it(tmp_path: Path) -> None:
    for name in (f"{tmp_path}/new/", str(tmp_path)):
        with open_records(name) as records:
            assert records.path == Path(name) / "part-00000.jsonl"
    with open_records(str(tmp_path / "file")) as records:
        assert records.path == tmp_path / "file"
    assert manifest_path(tmp_path) == tmp_path / "manifest.json"
