"""Records: which parts of an answer they keep, their ids, and the manifest of the runs beside them."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.records.key import RecordKey
from llama_adapter.app.jobs.records.manifest import (
    RunManifest,
    manifest_path,
    new_run_id,
    read_manifest,
    write_manifest,
)
from llama_adapter.app.jobs.records.record import Record, json_line, parse_record
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec, PictureInput
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.record_lines import FIELDS, RecordFileError
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS
from llama_adapter.vision.formats import PICTURE_NOTES
from tests.app.recorded import failed, recorded
from tests.app.toys import INFO


def test_a_record_has_every_key_in_its_order() -> None:
    record = recorded()
    assert list(record) == ["id", "picture", "prompt", "text", "finish", "choice", "tokens", "error", "ms", "run"]
    assert record["tokens"] == 3
    assert record["ms"] == {"clip": 1.235, "total": 9.0}
    assert (record["choice"], record["error"], record["run"]) == (None, None, "run-1")


@pytest.mark.parametrize("unfamiliar", [True, False])
def test_what_is_known_of_an_unfamiliar_picture_is_kept_and_records_without_it_are_records(unfamiliar: bool) -> None:
    record = recorded(unfamiliar=unfamiliar)
    assert record["unfamiliar"] is unfamiliar
    assert record["id"] == recorded()["id"], "it is no reason to answer again"
    assert "unfamiliar" not in recorded()
    for each in (record, recorded()):
        assert parse_record(json_line(each).encode()) == each


def test_choices_and_errors_are_kept_as_plain_values() -> None:
    chosen = recorded(finish="choice", text="Yes", choice={"Yes": 0.912345678, "No": 0.087654322})
    assert chosen["choice"] == {"Yes": 0.912346, "No": 0.0876543}
    assert failed("missing", "Wanted it.")["error"] == {"code": "missing", "message": "Wanted it."}


def test_a_line_is_one_line_of_readable_json_whatever_the_text() -> None:
    for text in ("été 图", "line\nbreak\r\u2028\x85", 'quote " \\', "lone \ud83d surrogate", "nul \0", ""):
        line = json_line(recorded(text=text))
        assert "\n" not in line
        line.encode()
        assert json.loads(line)["text"] == text
    assert "été" in json_line(recorded())


def test_numbers_that_json_lacks_become_null() -> None:
    record = recorded(ms={"total": float("inf")}, choice={"Yes": float("nan")})
    values = json.loads(json_line(record))
    assert (values["ms"], values["choice"]) == ({"total": None}, {"Yes": None})


@pytest.mark.parametrize(
    "values",
    [
        *({name: 5} for name in ("id", "picture", "prompt", "text", "finish", "run")),
        *({name: None} for name in ("id", "picture", "prompt", "text", "finish", "run", "tokens", "ms")),
        *({name: ...} for name in ("run", "text", "error", "choice", "tokens", "ms")),
        *({"error": wrong} for wrong in ("no", [], {}, {"code": 1, "message": ""}, {"code": "missing"})),
        *({"choice": wrong} for wrong in ([], {}, {"a": 1.0}, {"a": "1", "b": 0}, {"a": True, "b": 0})),
        *({"ms": wrong} for wrong in ([], {"total": "1"}, {"total": float("inf")}, {"total": 10**400})),
        *({"tokens": wrong} for wrong in ("3", 1.5, True, -1, 2**63, float("inf"), float("nan"))),
        *({"unfamiliar": wrong} for wrong in ("no", 0.5, 2.0, float("nan"))),
    ],
)
def test_a_value_of_another_kind_makes_a_line_no_record(values: dict[str, Any]) -> None:
    line = {name: value for name, value in {**recorded(), **values}.items() if value is not ...}
    assert parse_record(json.dumps(line).encode()) is None
    assert parse_record(json.dumps(recorded()).encode()) == recorded()


@pytest.mark.parametrize(
    ("name", "number", "value"),
    [
        *((name, number, bool(number)) for name in ("unfamiliar", *PICTURE_NOTES) for number in (0.0, 1.0)),
        *(("transparent", number, number) for number in (2.0, 0.5)),
        *((name, 3.0, 3) for name in ("tokens", "number", "row")),
        ("row", 0.5, 0.5),
        ("another", 1.0, 1.0),
    ],
)
def test_integers_and_truth_values_that_pandas_wrote_are_what_they_were(name: str, number: float, value: Any) -> None:
    found = parse_record(json.dumps(recorded() | {name: number}).encode())[name]
    assert (found, type(found)) == (value, type(value))


def test_the_fields_of_answers_are_those_of_records() -> None:
    assert FIELDS.keys() == Record.__required_keys__


@pytest.mark.parametrize(
    "name",
    ["9.41\u202fAM.png", "a\n\x1b[31m\x9b.png", "\u202egnp.png", os.fsdecode(b"inv\xff.png"), r"inv\xff.png"],
)
def test_a_name_reads_back_as_it_was_with_what_is_no_escape_and_no_terminal_acts_on_its_line(name: str) -> None:
    line = json_line(recorded(picture=name))

    record = parse_record(line.encode())
    assert record["picture"] == name
    assert not UNSAFE_ON_TERMINALS.search(line)


# Ids are equal for equal work, and do not change between versions


@pytest.mark.parametrize(
    ("record_id", "given"),
    [
        ("9ed16f15c5c18dfea69fb648b523a7a1", {}),
        ("9a789bee2ef8b676b246ddef11e521d8", {"question": Question(instruction="Is é it {stem}?")}),
        ("ed9e163e8177bb502680a5e5d47e8689", {"question": Question(instruction="Look", input="closely")}),
        ("e1481443e929312fd0bf7ca6e5127e7a", {"question": Question(raw="A picture of")}),
        ("e5ab80661ac220f5da864d1381afd07d", {"question": Question(instruction="Is it?", task=OneOf(("yes", "no")))}),
        ("78c63e6587f84d1435685e6129c5676b", {"sampling": SamplingParams(temperature=0.5, top_p=0.9, top_k=4, seed=7)}),
        ("ac63f72ee9fc539abb8edde21186dfd0", {"info": replace(INFO, precision="int8")}),
        ("442bce640844b7d4e852330f0a7c95e9", {"info": replace(INFO, encoder="ef" * 8, vision="onnx")}),
        (
            "206ccd2ed2b682f775119f701e49aad0",
            {"spec": CaptionerSpec(reading="fast", exif="ignore", channel_order="bgr")},
        ),
        ("d6e01b1b042ab60e84fdf99f1f56d4df", {"digest": "", "label": "été/\udcff.png"}),
    ],
    ids=["caption", "ask", "input", "raw", "choose", "sampled", "int8", "encoder", "fast", "no bytes"],
)
def test_ids_are_those_of_earlier_versions(record_id: str, given: dict[str, Any]) -> None:
    usual = {"question": Question(), "spec": CaptionerSpec(batch_size=8), "info": INFO, "sampling": SamplingParams()}
    of = SimpleNamespace(**{**usual, "digest": "cd" * 32, "label": "a.png", **given})
    job = Job(spec=of.spec, inputs=InputSpec(), questions=(of.question,), sampling=of.sampling)

    work, _ = JobPlanner(job, spec=of.spec, info=of.info).item(PictureInput(source="a.png", label=of.label))

    key: RecordKey = work.questions[0].tag.key
    assert key.id(of.digest) == record_id


def test_an_id_depends_on_everything_in_its_key_but_the_order_of_settings_and_the_name_of_a_readable_picture() -> None:
    key = RecordKey(picture="a.png", prompt="What?", model_digest="model", settings={"seed": None, "temperature": 0.0})
    same = [key, replace(key, settings=dict(reversed(key.settings.items()))), replace(key, picture="b.png")]
    others = [
        replace(key, prompt="What else?"),
        replace(key, model_digest="other"),
        replace(key, settings={**key.settings, "temperature": 0.5}),
    ]

    assert len({one.id("ab") for one in same}) == 1
    assert len({one.id("ab") for one in [key, *others]} | {key.id("cd")}) == 5
    assert key.id("") != replace(key, picture="b.png").id("")


# The manifest next to a record file


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def manifest(run: str = "run-1", **values: Any) -> RunManifest:
    return RunManifest(run=run, spec={"device": "cpu"}, model_digest="model", versions={"python": "3.11"}, **values)


def test_a_manifest_tells_the_circumstances_of_a_run_from_start_to_end(tmp_path: Path, out: Path) -> None:
    run = manifest(job={"paths": ["été-\udcff.png", "a \\udcff of its own"]})  # names need not be UTF-8
    write_manifest(out, manifest=run)
    (started,) = read_manifest(out)
    assert (started, started.ended_at) == (run, None)
    run.counts = {"stop": 2, "error": 1}
    run.end("finished")
    write_manifest(out, manifest=run)
    (ended,) = read_manifest(out)
    assert (ended.counts, ended.end_reason, ended.process) == (run.counts, "finished", os.getpid())
    assert ended.ended_at >= ended.started_at
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl.manifest.json"]


def test_every_run_that_appended_stays_in_the_manifest(tmp_path: Path, out: Path) -> None:
    for run in ("first", "second", "first"):
        write_manifest(out, manifest=manifest(run, counts={"stop": 1}))
    assert [run.run for run in read_manifest(out)] == ["first", "second"]
    assert read_manifest(tmp_path / "other.jsonl") == []


def test_a_manifest_has_no_password_of_an_address(out: Path) -> None:
    paths = ["s3://key:pass%2Fword@bucket/a.png", "abfs://folder@account/a@b:c.png", "http://[::1]:80/a@b"]
    write_manifest(out, manifest=manifest(job={"paths": paths}))
    assert read_manifest(out)[0].job["paths"] == ["s3://key@bucket/a.png", *paths[1:]]


def test_all_names_of_a_file_lead_to_one_manifest(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to("folder/answers.jsonl")  # like /dev/stdout

    write_manifest(tmp_path / "link.jsonl", manifest=manifest("first"))

    assert [run.run for run in read_manifest(tmp_path / "folder" / "answers.jsonl")] == ["first"]
    assert not (tmp_path / "link.jsonl.manifest.json").exists()


def test_a_manifest_of_an_older_version_without_the_newer_fields_is_read(out: Path) -> None:
    run = {"run": "old", "spec": {}, "model_digest": "m", "versions": {}, "started_at": "then", "counts": {"stop": 1}}
    manifest_path(out).write_text(json.dumps({"format": "llama-adapter-runs", "version": 1, "runs": [run]}))
    (read,) = read_manifest(out)
    assert (read.run, read.end_reason, read.counts) == ("old", None, {"stop": 1})


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"format": "other", "version": 1, "runs": []}', "\x89PNG"),
        '{"format": "llama-adapter-runs", "version": 1, "runs": '
        '[{"run": [], "spec": {}, "model_digest": "", "versions": {}}]}',
    ],
)
def test_an_invalid_manifest_is_refused_and_left_alone(content: str, out: Path) -> None:
    manifest_path(out).write_text(content)
    with pytest.raises(RecordFileError, match="Wanted a manifest"):
        write_manifest(out, manifest=manifest())
    assert manifest_path(out).read_text() == content


def test_run_ids_are_distinct_and_begin_with_their_time() -> None:
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(name[8] == "T" and name[15] == "Z" for name in ids)
