"""`export-records`: everything is derived from answer files, which are not changed."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_adapter.app.captioning.decisions.calibration import Calibration, write_calibration
from llama_adapter.app.jobs.exports.job import ExportRecordsJob, run_export_records
from llama_adapter.app.jobs.records.manifest import RunManifest, runs_behind, write_manifest
from llama_adapter.app.jobs.records.record import Record, json_line, read_records
from llama_adapter.app.learning.calibration.fitting import Examples, calibrate
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.extras import install_hint
from tests.app.recorded import failed as recorded_failure
from tests.app.recorded import recorded


def record(picture: str = "a.png", *, text: str = "a star", prompt: str = "What?", **changes: Any) -> Record:
    usual = {"id": f"{picture}{prompt}", "ms": {"total": 12.5}}
    return recorded(**{"picture": picture, "text": text, "prompt": prompt, **usual, **changes})


def asked(picture: str, yes: float) -> Record:
    text, choice = "Yes" if yes >= 0.5 else "No", {"Yes": yes, "No": round(1 - yes, 6)}
    return record(picture, text=text, prompt="Red?", finish="choice", choice=choice)


def failed(picture: str = "a.png", prompt: str = "What?") -> Record:
    return recorded_failure(picture=picture, prompt=prompt, id=f"name{prompt}")


class Answers:
    """An answer file in a separate folder, and exports of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "answers.jsonl"

    def write(self, records: Sequence[Record], end: str = "") -> None:
        self.path.write_text("".join(json_line(one) + "\n" for one in records) + end)

    def export(self, to: Any, out: str | None = None, **settings: Any) -> int:
        place = out if out in (None, "-") else str(self.folder / out)
        return run_export_records(ExportRecordsJob(records=(str(self.path),), to=to, out=place, **settings))

    def rows(self, name: str = "out.csv") -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO((self.folder / name).read_bytes().decode("utf-8-sig"), newline="")))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path)


def calibration(**changes: Any) -> Calibration:
    examples = Examples(
        probabilities_NC=np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]),
        labels_N=np.array([0, 0, 1, 1]),
        groups_N=np.arange(4),
    )
    found = calibrate(examples, choices=("Yes", "No"), question="Red?", model_digest="abc", target_precision=0.9)
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("to", "out", "settings"),
    [
        ("metadata", None, {}),  # needs a path
        ("metadata", "list.json", {}),  # must have another name
        ("sidecars", None, {"below": ("gone",)}),  # no such folder
        ("csv", "answers.jsonl", {"force": True}),  # would overwrite the records
        ("jsonl", ".", {"rows_per_file": 5}),  # the folder that holds the records
        ("jsonl", None, {"rows_per_file": 5}),  # needs a folder
        ("sidecars", "-", {}),  # many files, not stdout
    ],
)
def test_places_that_cannot_be_written_are_refused(
    answers: Answers, to: Any, out: str | None, settings: dict[str, Any]
) -> None:
    answers.write([record()])

    with pytest.raises(UsageError):
        answers.export(to, out, **settings)
    assert answers.names() == ["answers.jsonl"]
    assert list(read_records(answers.path)) == [record()]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No \.jsonl file"):
        run_export_records(ExportRecordsJob(records=(str(tmp_path),), to="csv"))


@pytest.mark.parametrize(
    "settings",
    [
        {"to": "csv", "threshold": 1.5},
        {"to": "csv", "abstain": (0.9, 0.1)},
        {"to": "csv", "below": (".",)},
        {"to": "sidecars", "out": "texts", "below": (".",)},
        {"to": "metadata", "rows_per_file": 5},
        {"to": "csv", "rows_per_file": 0},
        {"to": "sidecars", "suffix": ".PNG"},
        {"to": "sidecars", "template": "{text"},
        {"to": "sidecars", "template": "{name}"},
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_the_job(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(settings)[-1]):
        ExportRecordsJob(records=("a.jsonl",), **settings)


# Which records


def test_superseded_failures_and_a_torn_last_line_are_left_out_and_the_file_stays(answers: Answers) -> None:
    newer: Any = record() | {"further": [1]}  # with a key of a newer program
    answers.write([failed() | {"run": "earlier"}, newer, failed("b.png")], end='{"id": "torn')
    before = answers.path.read_bytes()

    assert answers.export("jsonl", "clean.jsonl") == ExitCode.OK
    assert list(read_records(answers.folder / "clean.jsonl")) == [newer, failed("b.png")]
    assert answers.path.read_bytes() == before
    assert answers.names() == ["answers.jsonl", "clean.jsonl"]


def test_only_answers_or_one_prompt_can_be_taken(answers: Answers) -> None:
    answers.write([record(), record(prompt="Where?"), failed("b.png")])
    answers.export("jsonl", "answered.jsonl", only_answers=True)
    answers.export("jsonl", "where.jsonl", prompt="Where?")

    assert len(list(read_records(answers.folder / "answered.jsonl"))) == 2
    assert list(read_records(answers.folder / "where.jsonl")) == [record(prompt="Where?")]


def test_unfamiliar_pictures_can_be_skipped(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"a.png": False, "b.png": True, "c.png": None}  # None: the model has no detector
    answers.write([record(name, unfamiliar=unfamiliar) for name, unfamiliar in shares.items()])

    assert answers.export("csv", "out.csv", skip_unfamiliar=True) == ExitCode.OK
    assert "1 unfamiliar" in capsys.readouterr().err
    assert [row["picture"] for row in answers.rows()] == ["a.png", "c.png"]


def test_a_prompt_that_is_nowhere_is_refused_with_those_there_are(answers: Answers) -> None:
    answers.write([record(), record(prompt="Where?")])

    with pytest.raises(UsageError) as refusal:
        answers.export("csv", "out.csv", prompt="Why?")
    assert refusal.value.hint == "there are: 'What?', 'Where?'"
    assert answers.names() == ["answers.jsonl"]


def test_a_file_that_is_there_is_replaced_by_force_only_and_a_failure_leaves_it(answers: Answers) -> None:
    answers.write([asked("a.png", 0.9)])
    (answers.folder / "out.csv").write_text("mine")

    with pytest.raises(UsageError):
        answers.export("csv", "out.csv")
    write_calibration(calibration(choices=("Left", "Right")), str(answers.folder / "c.json"))
    with pytest.raises(UsageError):
        answers.export("csv", "out.csv", force=True, calibration=str(answers.folder / "c.json"))
    assert (answers.folder / "out.csv").read_text() == "mine"
    answers.export("csv", "out.csv", force=True)
    assert [row["picture"] for row in answers.rows()] == ["a.png"]


# The table


@pytest.mark.proves("exports", "CPU")
def test_the_table_has_decision_probability_and_a_column_for_each_choice(answers: Answers) -> None:
    answers.write([record(), asked("b.png", 0.8), failed("c.png", prompt="Red?"), asked("d.png", 0.2)])
    answers.export("csv", "out.csv")
    caption, yes, failure, no = answers.rows()

    assert (caption["text"], caption["decision"], caption["probability"]) == ("a star", "", "")
    assert (yes["decision"], yes["probability"], yes["probability of Yes"]) == ("Yes", "0.8", "0.8")
    assert (failure["error"], failure["decision"], failure["probability of Yes"]) == ("truncated", "", "")
    assert (no["decision"], no["probability"], no["probability of No"]) == ("No", "0.8", "0.8")


def test_without_a_place_the_table_goes_to_stdout(answers: Answers, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    answers.write([record()])

    assert answers.export("csv") == ExitCode.OK
    assert answers.export("csv", "-", quiet=True) == ExitCode.OK
    out, talk = capfdbinary.readouterr()
    assert out.count(b'"a.png"') == 2
    assert talk == b"1 record on stdout; 0 without an answer, 0 superseded\n"


# Decisions


def test_a_calibration_changes_probabilities_and_decisions_and_the_record_stays(answers: Answers) -> None:
    write_calibration(calibration(temperature=2.0), str(answers.folder / "c.json"))
    answers.write([asked("a.png", 0.8)])
    answers.export("csv", "out.csv", calibration=str(answers.folder / "c.json"))
    answers.export("jsonl", "out.jsonl", calibration=str(answers.folder / "c.json"))

    row = answers.rows()[0]
    assert (row["decision"], row["probability"], row["calibrated probability of Yes"]) == ("No", "0.333333", "0.666667")
    line = json.loads((answers.folder / "out.jsonl").read_text())
    assert line == {**asked("a.png", 0.8), "decision": "No", "probability": 0.333333}  # its threshold is 0.7


def test_a_calibration_of_another_question_or_model_is_noted(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calibration(calibration(question="Blue?", threshold=None), str(answers.folder / "c.json"))
    answers.write([asked("a.png", 0.8)])
    write_manifest(answers.path, manifest=RunManifest(run="run-1", spec={}, model_digest="other", versions={}))
    answers.export("csv", "out.csv", calibration=str(answers.folder / "c.json"))

    talk = capsys.readouterr().err
    assert "note: the calibration is of 'Blue?', and there are answers to 'Red?'" in talk
    assert "note: the calibration is of another model" in talk
    assert "note: no threshold of this calibration reaches a precision of 90.0%" in talk


# Sidecars and metadata


def test_sidecars_hold_the_last_answer_or_what_was_decided(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.write([failed("a.png"), record("a.png"), record("a.png", id="other model", text="a moon"), failed("b.png")])

    assert answers.export("sidecars", "texts") == ExitCode.OK
    assert [path.read_text() for path in (answers.folder / "texts").iterdir()] == ["a moon\n"]
    assert capsys.readouterr().err.splitlines() == [
        "note: 1 answer came again (new model, settings or content): the last one counts",
        "1 text written, 0 there already; 2 without an answer, left out, 0 superseded",
    ]
    answers.write([asked("a.png", 0.6)])
    assert answers.export("sidecars", "decided", abstain=(0.2, 0.8), suffix=".caption") == ExitCode.OK
    assert (answers.folder / "decided" / "a.caption").read_text() == "undecided\n"
    answers.write([record("a\nb/a.png", text="A star.\n\n- red \r\n  - large")])
    assert answers.export("sidecars", "lines", template="{parent}\n{text}") == ExitCode.OK
    (path,) = (answers.folder / "lines").rglob("*.txt")
    assert path.read_text() == "a b A star. - red - large\n"


def test_beside_a_picture_in_no_folder_of_the_job_nothing_is_written_until_it_is_named(
    answers: Answers,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.chdir("/")  # it is no folder of a job, even if it is the current one
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("passwd", "shadow"):
        (elsewhere / name).touch()
    answers.write([record(str(elsewhere / "passwd")), record(str(elsewhere / "shadow"))])

    assert answers.export("sidecars", force=True) == ExitCode.FAILED
    assert sorted(path.name for path in elsewhere.iterdir()) == ["passwd", "shadow"]
    told = capsys.readouterr().err
    assert "it is in no folder that texts may be written to" in told
    assert f"hint: 2 pictures not in `{answers.folder}`, where texts may be written; --below" in told
    assert f"--below {elsewhere}" in told
    assert answers.export("sidecars", below=(str(elsewhere),)) == ExitCode.OK
    assert (elsewhere / "passwd.txt").read_text() == "a star\n"


def test_the_current_folder_and_that_of_the_records_are_those_of_the_job(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    current = tmp_path_factory.mktemp("current")
    monkeypatch.chdir(current)
    (current / "a.png").touch()
    (answers.folder / "b.png").touch()
    answers.write([record("a.png"), record(str(answers.folder / "b.png"))])

    assert answers.export("sidecars") == ExitCode.OK
    assert (current / "a.txt").exists()
    assert (answers.folder / "b.txt").exists()


@pytest.mark.parametrize("to", ["sidecars", "metadata"])
def test_where_one_text_has_place_several_prompts_are_refused(answers: Answers, to: str) -> None:
    answers.write([record(), record(prompt="Where?")])
    (answers.folder / "a.png").touch()

    with pytest.raises(UsageError) as refusal:
        answers.export(to, "")
    assert "'What?', 'Where?'" in refusal.value.hint
    assert not (answers.folder / "a.txt").exists()


def test_metadata_names_pictures_from_its_own_folder_and_counts_its_lines(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = answers.folder / "pics"
    (pictures / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.png"):
        (pictures / name).touch()
    strange = record(str(pictures / "a.png")) | {"unfamiliar": True}
    gone = record(str(pictures / "gone.png"))
    answers.write([gone, strange, asked(str(pictures / "sub/b.png"), 0.9), failed("elsewhere.png")])

    assert answers.export("metadata", "pics") == ExitCode.FAILED
    assert "2 records in" in capsys.readouterr().err
    lines = [json.loads(line) for line in (pictures / "metadata.jsonl").read_text().splitlines()]
    assert [(line["file_name"], line["text"]) for line in lines] == [("a.png", "a star"), ("sub/b.png", "Yes")]
    assert lines[0].keys() == lines[1].keys()
    assert [line["unfamiliar"] for line in lines] == [True, None]


def test_metadata_has_no_line_for_a_name_that_reads_like_an_escape_of_a_picture(answers: Answers) -> None:
    literal, real = (str(answers.folder / name) for name in (r"9.41\u202fAM.png", "9.41\u202fAM.png"))
    Path(real).touch()
    answers.write([record(real), record(literal, text="a moon")])

    assert answers.export("metadata", "") == ExitCode.FAILED
    (line,) = (answers.folder / "metadata.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "a star"


def test_metadata_refuses_pictures_outside_of_its_folder_and_writes_nothing(answers: Answers) -> None:
    (answers.folder / "pics").mkdir()
    answers.write([record(str(answers.folder / "a.png"))])

    with pytest.raises(UsageError):
        answers.export("metadata", "pics")
    assert list((answers.folder / "pics").iterdir()) == []


# Parquet


@pytest.mark.slow
def test_parquet_holds_every_record_with_the_runs(answers: Answers) -> None:
    import pyarrow.parquet as pq

    choice = {"all": 0.7, "half \ud800": 0.3}
    odd = record("inv\udcff.png", text="half \ud800", ms={"total": float("nan")}, unfamiliar=True, choice=choice)
    answers.write([record(), asked("b.png", 0.8), failed("c.png"), odd])
    manifest = RunManifest(run="run-1", spec={}, model_digest="abc", versions={})
    write_manifest(answers.path, manifest=manifest)

    assert answers.export("parquet", "out.parquet", abstain=(0.1, 0.9)) == ExitCode.OK
    caption, yes, failure, half = pq.read_table(answers.folder / "out.parquet").to_pylist()
    assert (caption["text"], caption["choice"], caption["decision"]) == ("a star", None, None)
    assert (yes["choice"], yes["decision"], yes["probability"]) == ([("Yes", 0.8), ("No", 0.2)], "undecided", 0.8)
    assert (failure["error_code"], failure["error_message"]) == ("truncated", "It is cut off.")
    assert (half["picture"], half["choice"]) == ("inv\\udcff.png", [("all", 0.7), ("half \\ud800", 0.3)])
    assert (half["text"], half["ms"]) == ("half \\ud800", [("total", None)])
    assert (caption["unfamiliar"], half["unfamiliar"]) == (None, True)
    metadata = pq.read_schema(answers.folder / "out.parquet").metadata
    assert json.loads(metadata[b"llama-adapter-runs"]) == [asdict(manifest)]


@pytest.mark.slow
def test_parquet_is_written_in_row_groups_and_shards_have_one_schema(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr("llama_adapter.app.jobs.exports.outputs.ROWS_IN_A_GROUP", 10)
    answers.write([record(f"{number}.png") for number in range(25)])
    answers.export("parquet", "a.parquet")
    answers.write([])
    answers.export("parquet", "b.parquet")

    assert pq.read_metadata(answers.folder / "a.parquet").num_row_groups == 3
    assert pq.read_schema(answers.folder / "a.parquet").equals(pq.read_schema(answers.folder / "b.parquet"))
    assert pq.read_table(answers.folder / "b.parquet").num_rows == 0


def test_without_pyarrow_parquet_names_the_extra_before_any_work(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    answers.write([record()])

    with pytest.raises(UsageError) as refusal:
        answers.export("parquet", "out.parquet")
    assert refusal.value.hint == install_hint("parquet")


# Parts


@pytest.mark.parametrize("to", ["csv", "jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_many_rows_can_be_divided_into_files_which_only_force_replaces(answers: Answers, to: Any) -> None:
    answers.write([record(f"{number}.png") for number in range(7)])
    folder = answers.folder / "parts"

    assert answers.export(to, "parts", rows_per_file=2) == ExitCode.OK
    assert len(list(folder.iterdir())) == 4
    with pytest.raises(UsageError):
        answers.export(to, "parts", rows_per_file=3)
    answers.export(to, "parts", rows_per_file=3, force=True)

    parts = sorted(folder.iterdir())
    assert [path.name for path in parts] == [f"part-0000{number}.{to}" for number in range(3)]
    if to == "jsonl":
        assert [len(list(read_records(path))) for path in parts] == [3, 3, 1]


def test_records_in_a_folder_bring_the_runs_of_their_folder(answers: Answers) -> None:
    folder = answers.folder / "records"
    folder.mkdir()
    (folder / "part-00000.jsonl").write_text(json_line(record()) + "\n")
    run = RunManifest(run="run-1", spec={}, model_digest="model", versions={})
    write_manifest(folder, manifest=run)

    assert [found.run for found in runs_behind([folder / "part-00000.jsonl", answers.path])] == ["run-1"]


# Names of every kind


def test_two_spellings_of_a_path_are_one_picture(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    answers.write([record("a.png", text="one", id="1"), record(str(tmp_path / "a.png"), text="two", id="2")])
    assert answers.export("kohya", "k.json") == ExitCode.OK
    assert json.loads((tmp_path / "k.json").read_text()) == {str(tmp_path / "a.png"): {"caption": "two"}}
