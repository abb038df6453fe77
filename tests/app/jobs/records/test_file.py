"""Record files: a crash loses at most the line being written; a full disk or another program costs no record."""

import errno
import gzip
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.jobs.records.file import RecordWriter, open_records
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.loss import RecordFileLostError
from llama_adapter.app.jobs.records.manifest import manifest_path
from llama_adapter.app.jobs.records.record import json_line, read_records
from llama_adapter.runtime.record_lines import RecordFileError
from tests.app.recorded import recorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def put(writer: RecordWriter, *texts: str) -> None:
    """Write a record for each text, about a picture of this name."""
    for text in texts:
        writer.write(recorded(text=text, picture=text))


def write(path: Path, *texts: str) -> RecordWriter:
    with RecordWriter(path) as writer:
        put(writer, *texts)
    return writer


def texts_in(path: Path) -> list[str]:
    return [record["text"] for record in read_records(path)]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_after_any_cut_the_whole_lines_survive_and_writing_goes_on(path: Path) -> None:
    write(path, "one", "two")
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for length in {*range(0, len(whole), 9), second - 1, second, second + 1, len(whole) - 1, len(whole)}:
        path.write_bytes(whole[:length] + bytes(7 * (length == second - 1)))  # zeros after a power failure
        survivors = ["one"] * (length >= second - 1) + ["two"] * (length >= len(whole) - 1)
        assert texts_in(path) == survivors
        writer = write(path, "three")
        assert texts_in(path) == [*survivors, "three"]
        if length in (second - 1, len(whole) - 1):
            assert writer.repair == "completed"
        elif length in (0, second, len(whole)):
            assert writer.repair is None
        else:
            assert writer.repair == "dropped"


def lines_of(*texts: str) -> bytes:
    """Records, one per line."""
    return b"".join(json_line(recorded(text=text)).encode() + b"\n" for text in texts)


WHOLE = lines_of("one", "two", "three")
HALF = WHOLE[:100]


@pytest.mark.parametrize(
    ("content", "repair"),
    [
        (WHOLE + lines_of("x" * 200_000)[:-5], "dropped"),  # longer than the block that is read at once
        (WHOLE + bytes(4096), "dropped"),  # zeros after a power failure
        *((WHOLE[:-1] + bytes(num_zeros), "completed") for num_zeros in (0, 1, 5000)),
        (b"\xef\xbb\xbf" + WHOLE, None),
        (WHOLE + b"\n \r\n", None),
    ],
    ids=["long", "zeros", "whole", "whole and zero", "whole and zeros", "byte order mark", "empty lines"],
)
def test_the_end_is_repaired_and_writing_goes_on(content: bytes, repair: str | None, path: Path) -> None:
    path.write_bytes(content)
    kept = ["one", "two", "three"]

    assert texts_in(path) == kept
    assert write(path, "four").repair == repair
    assert texts_in(path) == [*kept, "four"]


REFUSED = {
    "a picture": b"\x89PNG\r\n\x1a\n and more",
    "a letter": b"a letter\nin two lines",
    "a list": b"[1, 2]\n",
    "a list of records": b"[" + WHOLE.rstrip().replace(b"\n", b",") + b"]",
    "a list in several lines": b"[\n  {\n",
    "an object in several lines": b"{\n" + WHOLE[1:].replace(b", ", b",\n"),
    "a record with a number for a text": WHOLE.replace(b'"text": "', b'"text": 3, "was": "'),
    "a record with a negative count": WHOLE.replace(b'"tokens": ', b'"tokens": -1'),
    "a record without two fields": WHOLE.replace(b'"prompt": "', b'"p": "').replace(b', "finish": "', b', "f": "'),
    "an object without three": WHOLE.replace(b'"prompt"', b'"p"').replace(b'"finish"', b'"f"').replace(b'"ms"', b'"m"'),
    "a list of records at the end": WHOLE + b"[" + WHOLE.rstrip().replace(b"\n", b",") + b"]",
    "a line of LLaVA": b'{"id": "000000033471", "image": "33471.jpg", "conversations": []}\n',
    "another object": b'{"id": 1}\n',
    "an empty object": b"{}",
    "an empty line": b"\n",
    "zeros": bytes(50),
    "spaces for line feeds": WHOLE.replace(b"\n", b" "),
    "no line feeds": WHOLE.replace(b"\n", b""),
    "carriage returns": WHOLE.replace(b"\n", b"\r"),
    "one line": WHOLE.replace(b"\n", b" ").rstrip() + b"\n",
    "spaces for line feeds at the end": WHOLE + WHOLE.replace(b"\n", b" "),
    "carriage returns at the end": WHOLE + WHOLE.replace(b"\n", b"\r"),
    "a damaged one among several": WHOLE + HALF + WHOLE.replace(b"\n", b" "),
    "text at the end": WHOLE + b"my notes",
    "another object at the end": WHOLE + b'{"id": 1}',
    "half a list at the end": WHOLE + b"[1, 2",
    "zeros amid the end": WHOLE + b"\0\0\0" + HALF,
    "a byte order mark and one line": b"\xef\xbb\xbf" + WHOLE.replace(b"\n", b" "),
    "UTF-16": WHOLE.decode().encode("utf-16"),
    "UTF-16, big-endian": b"\xfe\xff" + WHOLE.decode().encode("utf-16-be"),
    "gzip": gzip.compress(WHOLE),
}


def test_a_file_with_anything_else_is_refused_and_left_alone(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    path, said = tmp_path / "answers.jsonl", {}
    for name, content in REFUSED.items():
        path.write_bytes(content)
        with pytest.raises(RecordFileError) as refused:
            RecordWriter(path)
        assert path.read_bytes() == content
        if name not in ("an empty line", "zeros"):  # readers skip these
            with pytest.raises(RecordFileError):
                list(read_records(path))
        said[name] = refused.value.message.partition(", but ")[2]
    assert said == snapshot


def test_an_end_that_is_longer_than_a_record_is_refused_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr("llama_adapter.runtime.record_lines.MAX_RECORD_BYTES", 200_000)
    monkeypatch.setattr("llama_adapter.app.jobs.records.file.MAX_RECORD_BYTES", 200_000)
    for end in (HALF + b"x" * 300_000, bytes(300_000) + HALF):
        path.write_bytes(WHOLE + end)
        with pytest.raises(RecordFileError, match="its end is not a record"):
            RecordWriter(path)
        is_left_alone = path.read_bytes() == WHOLE + end  # apart: pytest would print the difference
        assert is_left_alone


def test_reading_names_the_line_that_is_no_record(path: Path) -> None:
    write(path, "one")
    with open(path, "ab") as file:
        file.write(b"oops\n")
    write(path, "two")
    with pytest.raises(RecordFileError, match="line 2 is not a record"):
        list(read_records(path))


def test_a_file_that_got_no_record_does_not_stay_unless_it_was_there_before(tmp_path: Path) -> None:
    new, empty, whole = (tmp_path / name for name in ("new.jsonl", "empty.jsonl", "whole.jsonl"))
    empty.touch()
    write(whole, "one")
    for path in (new, empty, whole):
        with RecordWriter(path):
            assert path.exists()  # so that an unwritable path fails immediately
    assert [path.exists() for path in (new, empty, whole)] == [False, True, True]
    assert texts_in(whole) == ["one"]


def test_records_reach_the_system_one_by_one_and_the_disk_in_groups_and_a_new_name_is_durable_too(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    with RecordWriter(path, sync_every=1) as writer:
        put(writer, "one", "two")
    assert synced == [str(path), str(path.parent), str(path), str(path)]
    synced.clear()

    with RecordWriter(path, sync_every=3) as writer:
        for number in range(1, 8):
            writer.write(recorded())
            assert len(texts_in(path)) == 2 + number  # another reader sees it at once
            assert synced == [str(path)] * (number // 3)
    writer.close()
    assert synced == [str(path)] * 3  # the last sync is at the end


def test_a_pipe_takes_records_without_repair(tmp_path: Path) -> None:
    reader, writer_end = os.pipe()
    with RecordWriter(f"/dev/fd/{writer_end}") as writer:
        writer.write(recorded(text="through a pipe"))
    os.close(writer_end)
    with os.fdopen(reader, "rb") as pipe:
        assert json.loads(pipe.read())["text"] == "through a pipe"


# Two writers


def test_a_second_writer_is_refused_and_repairs_nothing_until_the_first_is_done(path: Path) -> None:
    with RecordWriter(path) as first:
        first.write(recorded(text="one"))
        with open(path, "ab") as file:
            file.write(HALF)
        with pytest.raises(RecordFileError, match="Another run is writing"):
            RecordWriter(path)
        assert path.read_bytes().endswith(HALF)
        os.truncate(path, path.stat().st_size - len(HALF))  # else the file has changed
    write(path, "two")
    assert texts_in(path) == ["one", "two"]


def test_a_file_that_its_last_writer_removes_is_created_again(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    first = RecordWriter(path)
    really_open, opened = open, 0

    def open_late(*arguments: object, **options: object) -> object:
        nonlocal opened
        file = really_open(*arguments, **options)  # type: ignore[call-overload]
        opened += 1
        if opened == 1:
            first.close()  # this removes the file, because nothing was written; `file` is then unlinked
        return file

    monkeypatch.setattr("builtins.open", open_late)
    write(path, "one")
    monkeypatch.undo()
    assert texts_in(path) == ["one"]


# Full disks


@pytest.mark.parametrize("room", [0, 1, 10, 150])
def test_what_does_not_fit_is_taken_back_and_the_rest_stays(room: int, path: Path) -> None:
    write(path, "one", "two")
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RecordWriter(path) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as refused:
                writer.write(recorded(text="three"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert refused.value.errno == errno.EFBIG
        assert path.read_bytes() == before
        writer.write(recorded(text="four"))  # there is free space again
    assert texts_in(path) == ["one", "two", "four"]


@pytest.mark.parametrize("call", ["os.fsync", "fcntl.flock"])
def test_a_failure_of_a_network_disk_names_the_file(call: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(call, fail)
    with pytest.raises(OSError, match=r"quota.*answers\.jsonl"):
        write(path, "one")


def test_a_full_device_raises(tmp_path: Path) -> None:
    writer = RecordWriter("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        writer.write(recorded())
    writer.close()


# A folder of parts: how `--out FOLDER/` reads and continues them


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two parts, as written by earlier versions."""
    write(tmp_path / "out" / "part-00000.jsonl", "a", "b")
    write(tmp_path / "out" / "part-00001.jsonl", "c")
    (tmp_path / "out" / ".lock").touch()
    return tmp_path / "out"


def parts(folder: Path) -> dict[str, list[str]]:
    return {path.name: texts_in(path) for path in folder.glob("*.jsonl")}


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


# If another program removes, moves, replaces or changes a file, the run reports it and loses no record


def lost_after(change: Callable[[], object], writer: RecordWriter, *texts: str) -> str:
    """The error at closing, if another program makes a change after some records were written."""
    put(writer, *texts)
    change()
    with pytest.raises(RecordFileLostError) as lost:
        writer.close()
    return lost.value.message


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    begun = tmp_path / "out" / "answers.jsonl"
    write(begun, "zero")
    begun.chmod(0o640)
    return begun


def test_a_file_that_was_removed_is_noticed_when_it_is_synced_and_written_again(begun: Path) -> None:
    writer = RecordWriter(begun, sync_every=2)
    put(writer, "one")
    begun.unlink()
    with pytest.raises(RecordFileLostError, match="its 3 records were written there again") as lost:
        writer.write(recorded(text="two"))
    writer.close()  # the loss is reported only once

    assert "goes on where this one ended" in lost.value.hint
    assert texts_in(begun) == ["zero", "one", "two"]
    assert stat.S_IMODE(begun.stat().st_mode) == 0o640
    assert files_in(begun.parent) == ["answers.jsonl"]
    write(begun, "three")
    assert texts_in(begun) == ["zero", "one", "two", "three"]


def test_records_that_cannot_be_written_again_are_reported_and_another_file_in_their_place_is_not_touched(
    begun: Path,
) -> None:
    def replace() -> None:
        begun.with_name("other").write_text("precious")
        begun.with_name("other").rename(begun)

    assert "2 records could not be written there again (File exists" in lost_after(replace, RecordWriter(begun), "one")
    assert begun.read_text() == "precious"
    begun.unlink()
    gone = lost_after(lambda: shutil.rmtree(begun.parent), RecordWriter(begun), "one")
    assert "1 records could not be written there again (No such file" in gone
    assert not begun.parent.exists()


@pytest.mark.parametrize(
    ("prepare", "change", "told", "left"),
    [
        ("", "mv out/answers.jsonl out/moved", "its 2 records are in `{}/out/moved`", "out/moved"),
        ("ln out/answers.jsonl out/b", "rm out/answers.jsonl", "2 records are in that file, under another", "out/b"),
        ("", "mv out elsewhere", "in `{}/elsewhere/answers.jsonl`", "elsewhere/answers.jsonl"),
        ("ln -s out/answers.jsonl link", "rm link", "in `{}/out/answers.jsonl`", "out/answers.jsonl"),
        ("ln -s out/answers.jsonl link", "rm out/answers.jsonl", "written there again", "link out/answers.jsonl"),
    ],
    ids=["moved", "two names", "folder moved", "link removed", "removed behind a link"],
)
def test_where_the_records_are_after_a_change(
    prepare: str, change: str, told: str, left: str, begun: Path, tmp_path: Path
) -> None:
    def shell(command: str) -> None:
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)

    shell(prepare)
    writer = RecordWriter(tmp_path / "link" if "link" in prepare else begun)

    assert told.format(tmp_path) in lost_after(lambda: shell(change), writer, "one")

    files = [file for file in tmp_path.rglob("*") if not file.is_dir()]
    assert sorted(str(file.relative_to(tmp_path)) for file in files) == left.split()
    assert all(texts_in(file) == ["zero", "one"] for file in files)
    assert (tmp_path / "link").is_symlink() == ("link " in left)


@pytest.mark.parametrize("content", [b"", b"x" * 10_000])
def test_a_file_that_another_program_changed_is_noticed_and_left_as_it_is(content: bytes, begun: Path) -> None:
    assert "Another program changed" in lost_after(lambda: begun.write_bytes(content), RecordWriter(begun), "one")

    assert begun.read_bytes() == content


def test_a_new_file_without_records_may_be_gone_and_another_one_stays(tmp_path: Path) -> None:
    begun = tmp_path / "answers.jsonl"
    with RecordWriter(begun):
        begun.unlink()
    assert files_in(tmp_path) == []
    with RecordWriter(begun):
        begun.unlink()
        begun.write_text("another's")
    assert begun.read_text() == "another's"


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
