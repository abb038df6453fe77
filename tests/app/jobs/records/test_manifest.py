"""The manifest next to a record file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.jobs.records.manifest import (
    RunManifest,
    manifest_path,
    new_run_id,
    read_manifest,
    write_manifest,
)
from llama_adapter.runtime.record_lines import RecordFileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def manifest(run: str = "run-1", **values: Any) -> RunManifest:
    return RunManifest(run=run, spec={"device": "cpu"}, model_digest="model", versions={"python": "3.11"}, **values)


def test_a_manifest_tells_the_circumstances_of_a_run_from_start_to_end(tmp_path: Path, path: Path) -> None:
    run = manifest()
    write_manifest(path, manifest=run)
    (started,) = read_manifest(path)
    assert started == run
    assert started.ended_at is None
    run.counts = {"stop": 2, "error": 1}
    run.end("finished")
    write_manifest(path, manifest=run)
    (ended,) = read_manifest(path)
    assert ended.counts == {"stop": 2, "error": 1}
    assert (ended.end_reason, ended.process) == ("finished", os.getpid())
    assert ended.ended_at >= ended.started_at
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl.manifest.json"]


def test_every_run_that_appended_stays_in_the_manifest(tmp_path: Path, path: Path) -> None:
    for run in ("first", "second", "first"):
        write_manifest(path, manifest=manifest(run, counts={"stop": 1}))
    assert [run.run for run in read_manifest(path)] == ["first", "second"]
    assert read_manifest(tmp_path / "other.jsonl") == []


def test_all_names_of_a_file_lead_to_one_manifest(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to("folder/answers.jsonl")  # like /dev/stdout

    write_manifest(tmp_path / "link.jsonl", manifest=manifest("first"))

    assert [run.run for run in read_manifest(tmp_path / "folder" / "answers.jsonl")] == ["first"]
    assert not (tmp_path / "link.jsonl.manifest.json").exists()


def test_a_manifest_of_an_older_version_without_the_newer_fields_is_read(path: Path) -> None:
    run = {"run": "old", "spec": {}, "model_digest": "m", "versions": {}, "started_at": "then", "counts": {"stop": 1}}
    manifest_path(path).write_text(json.dumps({"format": "llama-adapter-runs", "version": 1, "runs": [run]}))
    (read,) = read_manifest(path)
    assert (read.run, read.end_reason, read.counts) == ("old", None, {"stop": 1})


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"format": "other", "version": 1, "runs": []}', "\x89PNG"),
        '{"format": "llama-adapter-runs", "version": 1, "runs": '
        '[{"run": [], "spec": {}, "model_digest": "", "versions": {}}]}',
    ],
)
def test_an_invalid_manifest_is_refused_and_left_alone(content: str, path: Path) -> None:
    manifest_path(path).write_text(content)
    with pytest.raises(RecordFileError, match="Wanted a manifest"):
        write_manifest(path, manifest=manifest())
    assert manifest_path(path).read_text() == content


def test_names_that_are_not_utf_8_are_kept(tmp_path: Path) -> None:
    path, inputs = tmp_path / "answers.jsonl", {"paths": ["été-\udcff.png", "a \\udcff of its own"]}
    write_manifest(path, manifest=manifest(job={"inputs": inputs}))
    assert read_manifest(path)[0].job["inputs"] == inputs


def test_run_ids_are_distinct_and_begin_with_their_time() -> None:
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(name[8] == "T" and name[15] == "Z" for name in ids)
