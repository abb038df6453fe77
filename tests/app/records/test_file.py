"""Files of records: a crash costs at most the line being written, a full disk none, and a second writer is refused."""

import errno
import gzip
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from llama_adapter.app.records.file import RecordFileLockedError, RecordWriter
from llama_adapter.app.records.record import RecordFileError, read_records, record_to_line
from tests.app.recorded import recorded


def write(path: Path, *texts: str) -> RecordWriter:
    with RecordWriter(path) as writer:
        for text in texts:
            writer.write(recorded(text=text))
    return writer


def texts_in(path: Path) -> list[str]:
    return [record["text"] for record in read_records(path)]


def test_records_are_appended_and_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "answers.jsonl"
    assert write(path, "one", "two").num_written == 2
    assert write(path, "three\u2028").repair is None
    assert texts_in(path) == ["one", "two", "three\u2028"]
    assert next(read_records(path)) == recorded(text="one")
    assert path.read_bytes().endswith(b"\n")


def test_after_any_cut_the_whole_lines_survive_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one", "two")
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for length in {*range(0, len(whole), 9), second - 1, second, second + 1, len(whole) - 1, len(whole)}:
        path.write_bytes(whole[:length])
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


def test_a_torn_line_longer_than_a_block_is_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one", "x" * 200_000)
    os.truncate(path, path.stat().st_size - 5)
    assert write(path, "three").repair == "dropped"
    assert texts_in(path) == ["one", "three"]


def test_zeros_left_by_a_power_cut_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one")
    with open(path, "ab") as file:
        file.write(bytes(4096))
    assert write(path, "two").repair == "dropped"
    assert texts_in(path) == ["one", "two"]


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\r\n\x1a\n and more", b"a letter\nin two lines", b"[1, 2]\n", b'{"id": 1}\n', b"{}", b"\n", bytes(50)],
)
def test_a_file_of_something_else_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "precious.png"
    path.write_bytes(content)
    with pytest.raises(RecordFileError, match="line 1 is not a record"):
        RecordWriter(path)
    assert path.read_bytes() == content


def lines_of(*texts: str) -> bytes:
    """Records, a line each."""
    return b"".join(record_to_line(recorded(text=text)).encode() + b"\n" for text in texts)


WHOLE = lines_of("one", "two", "three")
HALF = WHOLE[:100]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (WHOLE.replace(b"\n", b" "), "line 1 holds several records: their line feeds are lost"),
        (WHOLE.replace(b"\n", b""), "line 1 holds several records: their line feeds are lost"),
        (WHOLE.replace(b"\n", b"\r"), "line 1 holds several records, divided by carriage returns alone"),
        (WHOLE.replace(b"\n", b" ").rstrip() + b"\n", "line 1 holds several records: their line feeds are lost"),
        (WHOLE + WHOLE.replace(b"\n", b" "), "{end} holds several records: their line feeds are lost"),
        (WHOLE + WHOLE.replace(b"\n", b"\r"), "{end} holds several records, divided by carriage returns alone"),
        (WHOLE + HALF + WHOLE.replace(b"\n", b" "), "{end} holds several records, and one of them is damaged"),
        (WHOLE + b"my notes", "{end} is not a record"),
        (WHOLE + b'{"id": 1}', "{end} is not a record"),
        (WHOLE + b"[1, 2", "{end} is not a record"),
        (WHOLE + b"\0\0\0" + HALF, "{end} is not a record"),
        (b"\xef\xbb\xbf" + WHOLE.replace(b"\n", b" "), "line 1 "),
        (WHOLE.decode().encode("utf-16"), "line 1 is in UTF-16"),
        (b"\xfe\xff" + WHOLE.decode().encode("utf-16-be"), "line 1 is in UTF-16"),
        (gzip.compress(WHOLE), "line 1 is compressed by gzip"),
    ],
)
def test_an_end_that_is_more_than_a_torn_record_is_refused_and_left_alone(
    content: bytes, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordFileError, match=re.escape(fault.format(end="its end"))):
        RecordWriter(path)
    assert path.read_bytes() == content
    with pytest.raises(RecordFileError, match=re.escape(fault.format(end="line 4"))):
        list(read_records(path))


def test_an_end_that_is_longer_than_a_record_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.jsonl"
    monkeypatch.setattr("llama_adapter.app.records.tail.MAX_RECORD_BYTES", 200_000)
    monkeypatch.setattr("llama_adapter.app.records.file.MAX_RECORD_BYTES", 200_000)
    for end in (HALF + b"x" * 300_000, bytes(300_000) + HALF):
        path.write_bytes(WHOLE + end)
        with pytest.raises(RecordFileError, match="its end has more than 200,000 bytes"):
            RecordWriter(path)
        is_left_alone = path.read_bytes() == WHOLE + end  # not in the assertion: pytest would show the difference
        assert is_left_alone


@pytest.mark.parametrize("num_zeros", [0, 1, 5000])
def test_a_whole_record_at_the_end_is_kept_with_zeros_behind_it_or_without(num_zeros: int, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(WHOLE[:-1] + bytes(num_zeros))
    assert texts_in(path) == ["one", "two", "three"]
    assert write(path, "four").repair == "completed"
    assert path.read_bytes() == WHOLE + lines_of("four")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + WHOLE)
    write(path, "four")
    assert texts_in(path) == ["one", "two", "three", "four"]


def test_reading_names_the_line_that_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one")
    with open(path, "ab") as file:
        file.write(b"oops\n")
    write(path, "two")
    with pytest.raises(RecordFileError, match="line 2 is not a record"):
        list(read_records(path))


def test_empty_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one")
    with open(path, "ab") as file:
        file.write(b"\n \r\n")
    write(path, "two")
    assert texts_in(path) == ["one", "two"]


def test_a_file_that_got_no_record_does_not_stay_unless_it_was_there_before(tmp_path: Path) -> None:
    new, empty, whole = (tmp_path / name for name in ("new.jsonl", "empty.jsonl", "whole.jsonl"))
    empty.touch()
    write(whole, "one")
    for path in (new, empty, whole):
        with RecordWriter(path):
            assert path.exists()  # so a place that cannot be written shows at once
    assert [path.exists() for path in (new, empty, whole)] == [False, True, True]
    assert texts_in(whole) == ["one"]


def test_records_reach_the_system_one_by_one_and_the_disk_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.jsonl"
    path.touch()  # a new file's name is made durable as well
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    with RecordWriter(path, sync_every=3) as writer:
        for number in range(1, 8):
            writer.write(recorded())
            assert len(texts_in(path)) == number  # seen by another reader at once
            assert len(syncs) == number // 3
    assert len(syncs) == 3  # the last at the end
    writer.close()
    assert len(syncs) == 3


def test_records_survive_a_process_that_dies_without_closing(tmp_path: Path) -> None:
    code = (
        "import json, os, sys\n"
        "from llama_adapter.app.records.file import RecordWriter\n"
        "writer = RecordWriter(sys.argv[1])\n"
        "for _ in range(5): writer.write(json.loads(sys.argv[2]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "answers.jsonl"
    arguments = [sys.executable, "-c", code, str(path), record_to_line(recorded())]
    done = subprocess.run(arguments, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -9
    assert len(texts_in(path)) == 5


def test_a_pipe_takes_records_without_repair(tmp_path: Path) -> None:
    reader, writer_end = os.pipe()
    with RecordWriter(f"/dev/fd/{writer_end}") as writer:
        writer.write(recorded(text="through a pipe"))
    os.close(writer_end)
    with os.fdopen(reader, "rb") as pipe:
        assert json.loads(pipe.read())["text"] == "through a pipe"


def test_groups_of_no_records_are_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RecordWriter(tmp_path / "answers.jsonl", sync_every=0)


# Two writers


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with RecordWriter(path) as first:
        with pytest.raises(RecordFileLockedError, match="Another run is writing"):
            RecordWriter(path)
        first.write(recorded(text="one"))
    write(path, "two")
    assert texts_in(path) == ["one", "two"]


def test_a_writer_in_another_process_is_refused_too_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    code = (
        "import sys\n"
        "from llama_adapter.app.records.file import RecordWriter\n"
        "writer = RecordWriter(sys.argv[1])\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(RecordFileLockedError):
            RecordWriter(path)
        holder.kill()
        holder.wait()
        write(path, "one")
    assert texts_in(path) == ["one"]


def test_a_refused_writer_leaves_a_torn_line_to_the_one_that_is_writing_it(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one")
    with RecordWriter(path):
        with open(path, "ab") as file:
            file.write(b'{"id": "half')
        with pytest.raises(RecordFileLockedError):
            RecordWriter(path)
        assert path.read_bytes().endswith(b'{"id": "half')
        os.truncate(path, path.stat().st_size - len('{"id": "half'))  # else the file was changed by another program


def test_a_file_that_was_removed_while_another_run_had_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.jsonl"
    first = RecordWriter(path)
    really_open, opened = open, 0

    def open_late(*arguments: object, **options: object) -> object:
        nonlocal opened
        file = really_open(*arguments, **options)  # type: ignore[call-overload]
        opened += 1
        if opened == 1:
            first.close()  # which removes the file, since nothing was written: `file` has no name any more
        return file

    monkeypatch.setattr("builtins.open", open_late)
    write(path, "one")
    monkeypatch.undo()
    assert texts_in(path) == ["one"]


# Full disks


@pytest.mark.parametrize("room", [0, 1, 10, 150])
def test_what_does_not_fit_is_taken_back_and_the_rest_stays(room: int, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
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
        writer.write(recorded(text="four"))  # there is room again
    assert texts_in(path) == ["one", "two", "four"]


def test_a_full_device_is_told(tmp_path: Path) -> None:
    writer = RecordWriter("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        writer.write(recorded())
    writer.close()


def test_a_cleared_file_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one", "two")
    with RecordWriter(path) as writer:
        writer.clear()
        writer.write(recorded(text="three"))
    assert texts_in(path) == ["three"]


def test_the_name_of_a_new_file_is_made_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    path = tmp_path / "answers.jsonl"

    with RecordWriter(path, sync_every=1) as writer:
        writer.write(recorded())
        writer.write(recorded())
    first, synced[:] = list(synced), []
    with RecordWriter(path) as writer:
        writer.write(recorded())

    assert first == [str(path), str(tmp_path), str(path), str(path)]
    assert synced == [str(path)]
