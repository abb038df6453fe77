"""Records: what is kept of an answer, and that a crash costs at most the line being written."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from app.records import (
    ErrorLike,
    Record,
    RecordFileError,
    RecordWriter,
    RunManifest,
    answer_to_record,
    manifest_path,
    new_run_id,
    read_manifest,
    read_records,
    record_id,
    record_to_line,
    write_manifest,
)

SAMPLING = {"max_new_tokens": 16, "temperature": 0.0, "choices": ["Yes", "No"]}


@dataclass(frozen=True, kw_only=True)
class FakeError:
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class FakeAnswer:
    picture: str = "pics/été.jpg"
    digest: str = "ab" * 32
    prompt: str = "What is it?"
    text: str = "a red\ncircle “图” \u2028"
    token_ids: Sequence[int] = (5, 6, 7)
    finish: str = "stop"
    choice: Mapping[str, float] | None = None
    error: ErrorLike | None = None
    ms: Mapping[str, float] = field(default_factory=lambda: {"clip": 1.23456, "total": 9.0})


def recorded(answer: FakeAnswer | None = None, *, run: str = "run-1", model_digest: str = "model") -> Record:
    return answer_to_record(answer or FakeAnswer(), model_digest=model_digest, sampling=SAMPLING, run=run)


# The record


def test_a_record_has_every_key_in_its_order() -> None:
    record = recorded()
    assert list(record) == ["id", "picture", "prompt", "text", "finish", "choice", "tokens", "error", "ms", "run"]
    assert record["tokens"] == 3
    assert record["ms"] == {"clip": 1.235, "total": 9.0}
    assert (record["choice"], record["error"], record["run"]) == (None, None, "run-1")


def test_choices_and_errors_are_kept_as_plain_values() -> None:
    chosen = recorded(FakeAnswer(finish="choice", text="Yes", choice={"Yes": 0.912345678, "No": 0.087654322}))
    assert chosen["choice"] == {"Yes": 0.912346, "No": 0.087654}
    failed = recorded(FakeAnswer(finish="error", digest="", error=FakeError(code="missing", message="Wanted it.")))
    assert failed["error"] == {"code": "missing", "message": "Wanted it."}


def test_a_line_is_one_line_of_readable_json_whatever_the_text() -> None:
    for text in ("été 图", "line\nbreak\r\u2028\x85", 'quote " \\', "lone \ud83d surrogate", "nul \0", ""):
        line = record_to_line(recorded(FakeAnswer(text=text)))
        assert "\n" not in line
        line.encode()
        assert json.loads(line)["text"] == text
    assert "été" in record_to_line(recorded())


def test_numbers_that_json_lacks_become_null() -> None:
    record = recorded(FakeAnswer(ms={"total": float("inf")}, choice={"Yes": float("nan")}))
    values = json.loads(record_to_line(record))
    assert (values["ms"], values["choice"]) == ({"total": None}, {"Yes": None})


def test_an_id_depends_on_everything_the_answer_depends_on_and_on_nothing_else() -> None:
    one = FakeAnswer()
    renamed = replace(one, picture="elsewhere/x.png", text="other", ms={}, finish="length")
    assert recorded(one)["id"] == recorded(renamed, run="run-2")["id"]
    shuffled = dict(reversed(SAMPLING.items()))
    same = record_id(one.digest, prompt=one.prompt, model_digest="model", sampling=shuffled)
    assert same == recorded(one)["id"]
    ids = {
        recorded(one)["id"],
        recorded(replace(one, digest="cd" * 32))["id"],
        recorded(replace(one, prompt="What else?"))["id"],
        recorded(one, model_digest="other")["id"],
        record_id(one.digest, prompt=one.prompt, model_digest="model", sampling={**SAMPLING, "temperature": 0.5}),
        record_id(one.digest, prompt=[1, 2], model_digest="model", sampling=SAMPLING),
    }
    assert len(ids) == 6


def test_an_id_stays_the_same_from_version_to_version() -> None:
    fixed = record_id("ab", prompt="Was ist das? é", model_digest="cd", sampling={"temperature": 0.0, "seed": None})
    canonical = rb'["ab","Was ist das? \u00e9","cd",{"seed":null,"temperature":0.0}]'
    assert fixed == hashlib.sha256(canonical).hexdigest()[:32]


def test_pictures_without_bytes_are_told_apart_by_their_names() -> None:
    gone = FakeAnswer(digest="", finish="error", error=FakeError(code="missing", message=""))
    assert recorded(replace(gone, picture="a.png"))["id"] != recorded(replace(gone, picture="b.png"))["id"]
    assert recorded(replace(gone, picture="a.png"))["id"] == recorded(replace(gone, picture="a.png"))["id"]


# The file


def write(path: Path, *texts: str) -> RecordWriter:
    with RecordWriter(path) as writer:
        for text in texts:
            writer.write(recorded(FakeAnswer(text=text)))
    return writer


def texts_in(path: Path) -> list[str]:
    return [record["text"] for record in read_records(path)]


def test_records_are_appended_and_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "answers.jsonl"
    assert write(path, "one", "two").num_written == 2
    assert write(path, "three\u2028").repair is None
    assert texts_in(path) == ["one", "two", "three\u2028"]
    assert next(read_records(path)) == recorded(FakeAnswer(text="one"))
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


def test_reading_names_the_line_that_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one")
    with open(path, "ab") as file:
        file.write(b"oops\n")
    write(path, "two")
    with pytest.raises(RecordFileError, match="line 2 is not a record"):
        list(read_records(path))


@pytest.mark.parametrize("value", [[1], {}, 1, None])
def test_a_line_whose_id_is_no_text_is_no_record(value: object, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "one")
    with open(path, "a") as file:
        file.write(json.dumps(recorded() | {"id": value}) + "\n")
    with pytest.raises(RecordFileError, match="line 2 is not a record"):
        list(read_records(path))


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
        "from app.records import RecordWriter\n"
        "writer = RecordWriter(sys.argv[1])\n"
        "for _ in range(5): writer.write(json.loads(sys.argv[2]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "answers.jsonl"
    arguments = [sys.executable, "-c", code, str(path), record_to_line(recorded())]
    done = subprocess.run(arguments, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -9
    assert len(texts_in(path)) == 5


def test_a_pipe_takes_records_without_repair(tmp_path: Path) -> None:
    reader, writer_end = os.pipe()
    with RecordWriter(f"/dev/fd/{writer_end}") as writer:
        writer.write(recorded(FakeAnswer(text="through a pipe")))
    os.close(writer_end)
    with os.fdopen(reader, "rb") as pipe:
        assert json.loads(pipe.read())["text"] == "through a pipe"


def test_groups_of_no_records_are_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RecordWriter(tmp_path / "answers.jsonl", sync_every=0)


# The manifest


def manifest(run: str = "run-1", **values: Any) -> RunManifest:
    return RunManifest(run=run, spec={"device": "cpu"}, model_digest="model", versions={"python": "3.11"}, **values)


def test_a_manifest_tells_the_circumstances_of_a_run_from_start_to_end(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    run = manifest()
    write_manifest(path, manifest=run)
    (started,) = read_manifest(path)
    assert started == run
    assert started.ended_at is None
    for finish in ("stop", "stop", "error"):
        run.count(recorded(FakeAnswer(finish=finish)))
    run.end()
    write_manifest(path, manifest=run)
    (ended,) = read_manifest(path)
    assert ended.counts == {"stop": 2, "error": 1}
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.started_at
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl.manifest.json"]


def test_every_run_that_appended_stays_in_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for run in ("first", "second", "first"):
        write_manifest(path, manifest=manifest(run, counts={"stop": 1}))
    assert [run.run for run in read_manifest(path)] == ["first", "second"]
    assert read_manifest(tmp_path / "other.jsonl") == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other", "version": 1, "runs": []}', "\x89PNG"])
def test_a_manifest_that_is_none_is_refused_and_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    manifest_path(path).write_text(content)
    with pytest.raises(RecordFileError, match="Wanted a manifest"):
        write_manifest(path, manifest=manifest())
    assert manifest_path(path).read_text() == content


def test_a_failed_write_leaves_the_old_manifest(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write_manifest(path, manifest=manifest())
    before = manifest_path(path).read_bytes()
    with pytest.raises(TypeError):
        write_manifest(path, manifest=manifest("run-2", counts={"stop": object()}))
    assert manifest_path(path).read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [manifest_path(path).name]


def test_run_ids_are_distinct_and_begin_with_their_time() -> None:
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(name[8] == "T" and name[15] == "Z" for name in ids)
