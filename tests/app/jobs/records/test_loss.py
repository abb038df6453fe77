"""If another program removes, moves, replaces or changes a record file, the run reports it and loses no record."""

import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_adapter.app.jobs.records.file import RecordWriter, open_records
from llama_adapter.app.jobs.records.loss import RecordFileLostError
from llama_adapter.app.jobs.records.record import read_records
from tests.app.recorded import recorded


def write(writer: RecordWriter, *texts: str) -> None:
    for text in texts:
        writer.write(recorded(text=text))


def texts_in(path: Path) -> list[str]:
    return [record["text"] for record in read_records(path)]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lost_after(change: Callable[[], object], writer: RecordWriter, *texts: str) -> str:
    """The error at closing, if another program makes a change after some records were written."""
    write(writer, *texts)
    change()
    with pytest.raises(RecordFileLostError) as lost:
        writer.close()
    return lost.value.message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out" / "answers.jsonl"
    with RecordWriter(path) as writer:
        write(writer, "zero")
    path.chmod(0o640)
    return path


def test_a_file_that_was_removed_is_noticed_when_it_is_synced_and_written_again(path: Path) -> None:
    writer = RecordWriter(path, sync_every=2)
    write(writer, "one")
    path.unlink()
    with pytest.raises(RecordFileLostError, match="its 3 records were written there again") as lost:
        writer.write(recorded(text="two"))
    writer.close()  # the loss is reported only once

    assert "goes on where this one ended" in lost.value.hint
    assert texts_in(path) == ["zero", "one", "two"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert files_in(path.parent) == ["answers.jsonl"]
    with RecordWriter(path) as later:
        write(later, "three")
    assert texts_in(path) == ["zero", "one", "two", "three"]


def test_another_file_in_its_place_is_not_touched(path: Path) -> None:
    first, second = (path.with_name(f"answers.rescued-{number}.jsonl") for number in (1, 2))

    def replace() -> None:
        first.write_text("precious too")
        path.with_name("other").write_text("precious")
        path.with_name("other").rename(path)

    assert f"to `{second}`" in lost_after(replace, RecordWriter(path), "one")

    assert (path.read_text(), first.read_text()) == ("precious", "precious too")
    assert texts_in(second) == ["zero", "one"]


def test_a_folder_that_is_gone_is_not_made_again_and_the_records_are_kept_above_it(path: Path, tmp_path: Path) -> None:
    kept = tmp_path / "answers.rescued-1.jsonl"

    assert f"to `{kept}`" in lost_after(lambda: shutil.rmtree(path.parent), RecordWriter(path), "one")

    assert files_in(tmp_path) == [kept.name]
    assert texts_in(kept) == ["zero", "one"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("prepare", "change", "told", "left"),
    [
        ("", "rm out/answers.jsonl", "its 2 records were written there again", "out/answers.jsonl"),
        ("", "mv out/answers.jsonl out/moved", "its 2 records are in `{}/out/moved`", "out/moved"),
        ("ln out/answers.jsonl out/b", "rm out/answers.jsonl", "2 records are in that file, under another", "out/b"),
        ("", "mv out elsewhere", "in `{}/elsewhere/answers.jsonl`", "elsewhere/answers.jsonl"),
        ("ln -s out/answers.jsonl link", "rm link", "in `{}/out/answers.jsonl`", "out/answers.jsonl"),
        ("ln -s out/answers.jsonl link", "rm out/answers.jsonl", "written there again", "link out/answers.jsonl"),
    ],
    ids=["removed", "moved", "two names", "folder moved", "link removed", "removed behind a link"],
)
def test_where_the_records_are_after_a_change(
    prepare: str, change: str, told: str, left: str, path: Path, tmp_path: Path
) -> None:
    def shell(command: str) -> None:
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)

    shell(prepare)
    writer = RecordWriter(tmp_path / "link" if "link" in prepare else path)

    assert told.format(tmp_path) in lost_after(lambda: shell(change), writer, "one")

    files = [file for file in tmp_path.rglob("*") if not file.is_dir()]
    assert sorted(str(file.relative_to(tmp_path)) for file in files) == left.split()
    assert all(texts_in(file) == ["zero", "one"] for file in files)
    assert (tmp_path / "link").is_symlink() == ("link " in left)


@pytest.mark.parametrize("content", [b"", b"x" * 10_000])
def test_a_file_that_another_program_changed_is_noticed_and_left_as_it_is(content: bytes, path: Path) -> None:
    assert "Another program changed" in lost_after(lambda: path.write_bytes(content), RecordWriter(path), "one")

    assert path.read_bytes() == content


def test_records_that_cannot_be_written_again_are_reported_as_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)

    said = lost_after(path.unlink, RecordWriter(path), "one")

    assert "its 2 records are lost" in said
    assert "No space left" in said
    assert files_in(path.parent) == []


def test_a_file_system_without_links_gets_it_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def replace() -> None:
        path.unlink()
        path.touch()

    monkeypatch.setattr("os.link", no_links)

    assert "written there again" in lost_after(path.unlink, RecordWriter(path))
    assert "rescued-1" in lost_after(replace, RecordWriter(path), "one")

    assert texts_in(path.with_name("answers.rescued-1.jsonl")) == ["zero", "one"]
    assert path.read_bytes() == b""


def test_a_new_file_without_records_may_be_gone_and_another_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with RecordWriter(path):
        path.unlink()
    assert files_in(tmp_path) == []
    with RecordWriter(path):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


@pytest.mark.parametrize("is_moved", [False, True])
def test_older_parts_are_reported_as_lost_unless_they_were_moved(tmp_path: Path, is_moved: bool) -> None:
    folder = tmp_path / "records"
    with RecordWriter(folder / "part-00000.jsonl") as earlier:
        write(earlier, "one", "two")
    (folder / "part-00001.jsonl").touch()
    records = open_records(str(folder))

    lose = (lambda: folder.rename(tmp_path / "elsewhere")) if is_moved else (lambda: shutil.rmtree(folder))
    said = lost_after(lose, records, "three")

    assert ("1 older parts are gone" in said) is not is_moved
    kept = tmp_path / ("elsewhere/part-00001.jsonl" if is_moved else "part-00001.rescued-1.jsonl")
    assert texts_in(kept) == ["three"]


def test_stdout_that_is_a_file_may_get_other_lines_and_lose_its_name(tmp_path: Path) -> None:
    code = (
        "import json, os, sys\n"
        "from llama_adapter.app.jobs.records.file import RecordWriter\n"
        "from tests.app.recorded import recorded\n"
        "with RecordWriter('/dev/stdout') as writer:\n"
        "    writer.write(recorded())\n"
        "    print('a note', file=sys.stdout, flush=True)\n"
        "    os.unlink(sys.argv[1])\n"
    )
    out = tmp_path / "out"
    with open(out, "ab+") as file:
        done = subprocess.run(
            [sys.executable, "-c", code, str(out)], stdout=file, cwd=Path(__file__).parents[4], check=False
        )
        file.seek(0)
        lines = file.read().splitlines()

    assert done.returncode == 0
    assert len(lines) == 2
