"""Answer files are read, indexed, appended to and exported, whatever they contain; no complete line is ever lost."""

import contextlib
import io
import json
import zlib
from typing import Any

import pytest

from llama_adapter.app.captioning.decisions.calibration import read_calibration, write_calibration
from llama_adapter.app.jobs.exports.job import ExportRecordsJob, run_export_records
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.manifest import RunManifest, read_manifest, write_manifest
from llama_adapter.app.jobs.records.record import Record, json_line, parse_record, read_records
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.record_lines import RecordFileError
from tests.app.captioning.decisions.test_calibration import calibration as fitted
from tests.app.recorded import failed, recorded
from tests.fuzz.mutators import either, mutated_bytes, mutated_json, mutated_lines, words
from tests.fuzz.target import Target, new_folder, refused, scratch, written

NEW = recorded(picture="new.png", digest="ef" * 32)
_NEW_LINE = json_line(NEW).encode() + b"\n"


def resume(data: bytes) -> str:
    """A file of answers: read, indexed, and appended to like by a resumed run."""
    path = written("answers.jsonl", data)
    try:
        before: list[Record] | None = list(read_records(path))
    except RecordFileError as error:
        outcome, before = refused(error), None
        with pytest.raises(RecordFileError):
            RecordIndex([path])
    else:
        outcome = f"ok {min(len(before), 9)}"
        index = RecordIndex([path])
        assert len(index) == len(before)
        for record in before[:20]:
            assert index.look_up(record["id"], record["picture"]) in ("answered", "failed")
    return outcome + _append(path, data, before)


def _append(path: Any, data: bytes, before: list[Record] | None) -> str:
    try:
        with RecordWriter(path, sync_every=1000) as writer:
            writer.write(NEW)
    except RecordFileError as error:
        assert path.read_bytes() == data, "a file that is refused was changed"
        return "; " + refused(error)
    now = path.read_bytes()
    end = data.rfind(b"\n") + 1
    kept, tail = data[:end], data[end:]
    assert now.startswith(kept), "a whole line was lost"
    assert now.endswith(_NEW_LINE)
    if parse_record(whole := tail.rstrip(b"\0")) is not None:  # a power failure leaves zeros
        assert now == kept + whole + b"\n" + _NEW_LINE, "a whole last record was lost"
    else:
        assert not _begins_with_record(tail), "a whole record was cut off with a torn one"
    if before is not None:
        after = list(read_records(path))
        # Compared as text, because NaN is not equal to itself.
        assert json.dumps(after) == json.dumps([*before, NEW])
    return f"; appended {writer.repair}"


def _begins_with_record(tail: bytes) -> bool:
    try:
        value, _ = json.JSONDecoder().raw_decode(tail.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return False
    return parse_record(json.dumps(value).encode()) is not None


def export(data: bytes) -> str:
    """A file of answers through `export-records`, to the form that its bytes choose."""
    path, out = written("answers.jsonl", data), new_folder("out")
    kind = ("csv", "jsonl", "metadata", "sidecars", "parquet")[zlib.crc32(data) % 5]
    place = str(out if kind in ("metadata", "sidecars") else out / f"answers.{kind}")
    job = ExportRecordsJob(records=(str(path),), to=kind, out=place, quiet=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            code = run_export_records(job)
    except (UsageError, RecordFileError) as error:
        assert path.read_bytes() == data
        return f"{kind} " + refused(error, is_shown=False)  # the message quotes a prompt unchanged
    assert code in (0, 1)
    return f"ok {kind} {code}"


def manifest(data: bytes) -> str:
    """The manifest of runs beside a file of answers: read, and written again with one more run."""
    records = scratch() / "told.jsonl"
    path = written("told.jsonl.manifest.json", data)
    try:
        runs = read_manifest(records)
    except RecordFileError as error:
        return refused(error, is_shown=False)  # the message quotes a wrong version unchanged
    write_manifest(records, manifest=RunManifest(run="new", spec={}, model_digest="d", versions={}))
    assert [run.run for run in read_manifest(records)][-1] == "new"
    path.unlink()
    return f"ok {min(len(runs), 5)}"


def calibration(data: bytes) -> str:
    """A calibration, and decisions by it."""
    try:
        found = read_calibration(str(written("calibration.json", data)))
    except UsageError as error:
        return refused(error, is_shown=False)
    shares = found.apply(dict.fromkeys(found.choices, 1 / len(found.choices)))
    assert list(shares) == list(found.choices)
    return f"ok {found.rule is None}"


def _files() -> dict[str, bytes]:
    answers = [
        recorded(),
        recorded(picture="b/c.png", text="two", finish="length", unfamiliar=True),
        failed(picture="a.png", digest="ab" * 32),
        recorded(picture="a.png", text="again"),
        recorded(picture="x\\udcff.png", digest="", text="half \ud800"),
        recorded(picture="data.tar/1.jpg", prompt="Second?", text="=1+1"),
    ]
    choices = [recorded(picture=f"{n}.png", finish="choice", choice={"yes": n / 4, "no": 1 - n / 4}) for n in range(4)]
    lines = [json_line(record).encode() for record in answers]
    many = b"".join(json_line(record).encode() + b"\n" for record in choices)
    whole = b"\n".join(lines) + b"\n"
    return {
        "whole": whole,
        "torn": whole[:-40],
        "no-line-feed-at-the-end": whole[:-1],
        "blank-lines": whole.replace(b"\n", b"\n\n"),
        "one": lines[1] + b"\n",
        "choices": many,
        "windows": whole.replace(b"\n", b"\r\n"),
        "empty": b"",
    }


def _manifests() -> dict[str, bytes]:
    run = RunManifest(run="r1", spec={"device": "cpu"}, model_digest="ab", versions={"torch": "2"}, host="h", process=1)
    write_manifest(scratch() / "made.jsonl", manifest=run)
    return {"one": (scratch() / "made.jsonl.manifest.json").read_bytes()}


def _calibrations() -> dict[str, bytes]:
    seeds = {}
    for name, made in (("one", fitted()), ("out-of-reach", fitted(target_precision=1.0))):
        write_calibration(made, str(scratch() / "made.json"))
        seeds[name] = (scratch() / "made.json").read_bytes()
    return seeds


_WORDS = (
    *Record.__annotations__,
    *words("code message total stop length choice error a.png ../../a.png /a.png"),
    *("a.png\0", "a/../b.png", "data.tar/1.jpg", "http://x/a.png", {"yes": 0.5, "no": None}),
    {"code": "x", "message": "y"},
)
_as_json = mutated_json(*_WORDS)
_as_lines = either(
    mutated_lines(_as_json), mutated_lines(_as_json), mutated_lines(mutated_bytes(b"\n", b"\r", b'{"id": "'))
)
TARGETS = (
    Target("records-resume", resume, _files, _as_lines),
    Target("records-export", export, _files, _as_lines),
    Target("runs", manifest, _manifests, mutated_json("runs", "run", "spec", "counts", "llama-adapter-runs", 1, 2)),
    Target(
        *("calibration", calibration, _calibrations),
        mutated_json("temperature", "threshold", "choices", "bins_after", "yes", 0.5, 1.0),
    ),
)
