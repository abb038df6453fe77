"""`export-records`: everything is derived from answer files, which are not changed; and which records count."""

import csv
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.captioning.decisions.calibration import write_calibration
from llama_adapter.app.jobs.exports.job import ExportRecordsJob, run_export_records
from llama_adapter.app.jobs.exports.survey import Selection, Survey, record_files, survey
from llama_adapter.app.jobs.records.manifest import RunManifest, runs_behind, write_manifest
from llama_adapter.app.jobs.records.record import Record, json_line, read_records
from llama_adapter.app.learning.calibration.fitting import Examples, calibrate
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.record_lines import RecordFileError
from tests.app.recorded import failed as failure
from tests.app.recorded import recorded

RUN = RunManifest(run="run-1", spec={}, model_digest="abc", versions={})


def record(picture: str = "a.png", *, prompt: str = "What?", failed: bool = False, **changes: Any) -> Record:
    """The record of an answer, whose id is of the picture and prompt, or of a failure, whose id is of the name."""
    usual = {"picture": picture, "prompt": prompt, "id": f"{'name of ' * failed}{picture}{prompt}"}
    answer = {"text": "a star", "ms": {"total": 12.5}}
    return failure(**usual | changes) if failed else recorded(**usual | answer | changes)


def asked(picture: str, yes: float) -> Record:
    text, choice = "Yes" if yes >= 0.5 else "No", {"Yes": yes, "No": round(1 - yes, 6)}
    return record(picture, text=text, prompt="Red?", finish="choice", choice=choice)


class Answers:
    """An answer file in a separate folder, and exports of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "answers.jsonl"

    def write(self, *records: Record, name: str = "answers.jsonl", end: str = "") -> str:
        """Write a file of records; returns its path."""
        (self.folder / name).write_text("".join(json_line(one) + "\n" for one in records) + end)
        return str(self.folder / name)

    def export(self, to: Any, out: str | None = None, **settings: Any) -> int:
        place = out if out in (None, "-") else str(self.folder / out)
        return run_export_records(ExportRecordsJob(records=(str(self.path),), to=to, out=place, **settings))

    def surveyed(self, *records: Record, **chosen: Any) -> Survey:
        return survey([self.write(*records)], Selection(**chosen))

    def records(self, name: str = "answers.jsonl") -> list[Record]:
        return list(read_records(self.folder / name))

    def rows(self) -> list[dict[str, str]]:
        table = (self.folder / "out.csv").read_bytes().decode("utf-8-sig")
        return list(csv.DictReader(io.StringIO(table, newline="")))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path)


def calibration(folder: Path, **changes: Any) -> str:
    """The file of a calibration."""
    examples = Examples(
        probabilities_NC=np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]),
        labels_N=np.array([0, 0, 1, 1]),
        groups_N=np.arange(4),
    )
    found = calibrate(examples, choices=("Yes", "No"), question="Red?", model_digest="abc", target_precision=0.9)
    write_calibration(replace(found, **changes), str(folder / "c.json"))
    return str(folder / "c.json")


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
def test_places_that_cannot_be_written_are_refused(answers: Answers, to: str, out: Any, settings: Any) -> None:
    answers.write(record())

    with pytest.raises(UsageError):
        answers.export(to, out, **settings)
    assert answers.names() == ["answers.jsonl"]
    assert answers.records() == [record()]


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


def test_superseded_failures_and_a_torn_last_line_are_left_out_and_the_file_stays(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    newer: Any = record() | {"further": [1]}  # with a key of a newer program
    rest = [record("b.png", failed=True), record(prompt="Where?"), record("c.png", unfamiliar=True)]
    answers.write(record(failed=True, run="earlier"), newer, *rest, end='{"id": "torn')
    before = answers.path.read_bytes()

    assert answers.export("jsonl", "clean.jsonl") == ExitCode.OK
    answers.export("jsonl", "some.jsonl", prompt="What?", only_answers=True, skip_unfamiliar=True)
    assert "1 unfamiliar" in capsys.readouterr().err
    assert answers.records("clean.jsonl") == [newer, *rest]
    assert answers.records("some.jsonl") == [newer]
    assert answers.path.read_bytes() == before
    assert answers.names() == ["answers.jsonl", "clean.jsonl", "some.jsonl"]


same = partial(record, id="1")


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        # A failure is superseded by a record of a later run about the same picture and prompt.
        (
            [
                same(id="name", failed=True, run="earlier"),
                same("b.png", failed=True),
                same(id="2"),
                same(id="9", prompt="q", failed=True),
            ],
            [1, 2, 3],
        ),
        # It is not superseded by its own run, which asked something else or read a picture with the same name.
        ([same(id="cut off", failed=True), same(id="2"), same(id="too many choices", failed=True)], [0, 1, 2]),
        ([same(failed=True), same(failed=True, run="later")], [1]),
        ([same(), same(id="name", failed=True)], [0, 1]),  # the picture disappeared after its answer
        ([same(text="first"), same(text="last"), same(failed=True)], [1]),
        ([same("a.png"), same("b.png")], [0, 1]),  # copies
    ],
    ids=["superseded", "own run", "failed again", "missing later", "written twice", "copies"],
)
def test_which_records_count(answers: Answers, records: list[Record], kept: list[int]) -> None:
    found = answers.surveyed(*records)

    assert list(found.records()) == [records[index] for index in kept]
    num_failed = sum(records[index]["error"] is not None for index in kept)
    assert (found.num_taken, found.num_failed) == (len(kept), num_failed)
    assert found.num_superseded == len(records) - len(kept)


def test_a_picture_with_two_prompts_is_noticed_unless_one_is_chosen(answers: Answers) -> None:
    records = [record(prompt="p", run="one"), record(prompt="q", run="two")]

    both = answers.surveyed(*records)
    assert (both.has_several_prompts, both.num_repeated) == (True, 0)
    chosen = answers.surveyed(*records, prompt="q")
    assert not chosen.has_several_prompts
    assert [one["prompt"] for one in chosen.records()] == ["q"]
    assert (list(chosen.prompts), list(chosen.runs)) == (["p", "q"], ["two"])


def test_failures_and_unfamiliar_pictures_are_counted_and_left_out_if_so_chosen(answers: Answers) -> None:
    records = [
        record(run="one"),
        record("b.png", failed=True, run="two"),
        record("c.png", unfamiliar=True, run="three"),
    ]
    found = answers.surveyed(*records, only_answers=True, skip_unfamiliar=True)

    assert [one["picture"] for one in found.records()] == ["a.png"]
    assert (found.num_taken, found.num_failed, found.num_unfamiliar, list(found.runs)) == (1, 1, 1, ["one"])


def test_shards_are_read_as_one_file(answers: Answers) -> None:
    answers.write(same(id="2"), name="part-10.jsonl")
    answers.write(same(id="name", failed=True, run="earlier"), name="part-9.jsonl")
    (answers.folder / "part-9.jsonl.manifest.json").write_text("{}")

    files = record_files([str(answers.folder)])
    assert [Path(file).name for file in files] == ["part-9.jsonl", "part-10.jsonl"]
    assert [one["id"] for one in survey(files, Selection()).records()] == ["2"]
    assert record_files([files[0], str(answers.folder)]) == files


def test_a_folder_without_records_and_a_pipe_which_cannot_be_read_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No \.jsonl file"):
        run_export_records(ExportRecordsJob(records=(str(tmp_path),), to="csv"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="read twice"):
        record_files([str(tmp_path / "pipe.jsonl")])


def test_records_that_come_between_the_readings_do_not_count_and_fewer_are_an_error(answers: Answers) -> None:
    paths = [answers.write(record(name), record(f"1{name}"), name=name) for name in ("a.jsonl", "b.jsonl")]
    found = survey(paths, Selection())
    with open(paths[0], "a") as file:
        file.write(json_line(record("later")) + "\n")

    assert [one["picture"] for one in found.records()] == ["a.jsonl", "1a.jsonl", "b.jsonl", "1b.jsonl"]
    answers.write(record("new"), name="a.jsonl")
    with pytest.raises(RecordFileError, match=r"a\.jsonl` had 2 records at first and 1 later"):
        list(found.records())


@given(
    st.lists(
        st.builds(
            record,
            picture=st.sampled_from(["a", "b"]),
            id=st.sampled_from(["1", "2", "3"]),
            prompt=st.sampled_from(["p", "q"]),
            failed=st.booleans(),
            run=st.sampled_from(["r", "s"]),
        ),
        max_size=12,
    )
)
def test_every_picture_and_prompt_keeps_an_answer_if_it_ever_had_one(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    kept = list(Answers(tmp_path_factory.getbasetemp()).surveyed(*records).records())

    def answered(some: Sequence[Record]) -> set[tuple[str, ...]]:
        return {(one["picture"], one["id"]) for one in some if one["error"] is None}

    assert answered(kept) == answered(records)
    assert len({(one["id"], one["picture"]) for one in kept}) == len(kept)
    for one in (one for one in kept if one["error"] is not None):
        alike = [other for other in records if (other["picture"], other["prompt"]) == (one["picture"], one["prompt"])]
        assert alike[-1]["run"] == one["run"]


def test_a_prompt_that_is_nowhere_is_refused_with_those_there_are(answers: Answers) -> None:
    answers.write(record(), record(prompt="Where?"))

    with pytest.raises(UsageError) as refusal:
        answers.export("csv", "out.csv", prompt="Why?")
    assert refusal.value.hint == "there are: 'What?', 'Where?'"
    assert answers.names() == ["answers.jsonl"]


def test_a_file_that_is_there_is_replaced_by_force_only_and_a_failure_leaves_it(answers: Answers) -> None:
    answers.write(asked("a.png", 0.9))
    (answers.folder / "out.csv").write_text("mine")

    with pytest.raises(UsageError):
        answers.export("csv", "out.csv")
    with pytest.raises(UsageError):
        answers.export("csv", "out.csv", force=True, calibration=calibration(answers.folder, choices=("Left", "Right")))
    assert (answers.folder / "out.csv").read_text() == "mine"
    answers.export("csv", "out.csv", force=True)
    assert [row["picture"] for row in answers.rows()] == ["a.png"]


# The table


@pytest.mark.proves("exports", "CPU")
def test_the_table_has_decision_probability_and_a_column_for_each_choice(answers: Answers) -> None:
    unanswered = record("c.png", prompt="Red?", failed=True)
    answers.write(record(), asked("b.png", 0.8), unanswered, asked("d.png", 0.2))
    answers.export("csv", "out.csv")
    caption, yes, failure, no = answers.rows()

    assert (caption["text"], caption["decision"], caption["probability"]) == ("a star", "", "")
    assert (yes["decision"], yes["probability"], yes["probability of Yes"]) == ("Yes", "0.8", "0.8")
    assert (failure["error"], failure["decision"], failure["probability of Yes"]) == ("truncated", "", "")
    assert (no["decision"], no["probability"], no["probability of No"]) == ("No", "0.8", "0.8")


def test_without_a_place_the_table_goes_to_stdout(answers: Answers, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    answers.write(record())

    assert answers.export("csv") == ExitCode.OK
    assert answers.export("csv", "-", quiet=True) == ExitCode.OK
    out, talk = capfdbinary.readouterr()
    assert out.count(b'"a.png"') == 2
    assert talk == b"1 record on stdout; 0 without an answer, 0 superseded\n"


# Decisions


def test_a_calibration_changes_probabilities_and_decisions_and_the_record_stays(answers: Answers) -> None:
    file = calibration(answers.folder, temperature=2.0)
    answers.write(asked("a.png", 0.8))
    answers.export("csv", "out.csv", calibration=file)
    answers.export("jsonl", "out.jsonl", calibration=file)

    row = answers.rows()[0]
    assert (row["decision"], row["probability"], row["calibrated probability of Yes"]) == ("No", "0.333333", "0.666667")
    line = json.loads((answers.folder / "out.jsonl").read_text())
    assert line == {**asked("a.png", 0.8), "decision": "No", "probability": 0.333333}  # its threshold is 0.7


def test_a_calibration_of_another_question_or_model_is_noted(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.write(asked("a.png", 0.8))
    write_manifest(answers.path, manifest=replace(RUN, model_digest="other"))
    answers.export("csv", "out.csv", calibration=calibration(answers.folder, question="Blue?", threshold=None))

    talk = capsys.readouterr().err
    assert "note: the calibration is of 'Blue?', and there are answers to 'Red?'" in talk
    assert "note: the calibration is of another model" in talk
    assert "note: no threshold of this calibration reaches a precision of 90.0%" in talk


# Sidecars and metadata


def test_sidecars_hold_the_last_answer_or_what_was_decided(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    other = record(id="other model", text="a moon")
    answers.write(record(failed=True), record(), other, record("b.png", failed=True))

    assert answers.export("sidecars", "texts") == ExitCode.OK
    assert [path.read_text() for path in (answers.folder / "texts").iterdir()] == ["a moon\n"]
    assert capsys.readouterr().err.splitlines() == [
        "note: 1 answer came again (new model, settings or content): the last one counts",
        "1 text written, 0 there already; 2 without an answer, left out, 0 superseded",
    ]
    answers.write(asked("a.png", 0.6))
    assert answers.export("sidecars", "decided", abstain=(0.2, 0.8), suffix=".caption") == ExitCode.OK
    assert (answers.folder / "decided" / "a.caption").read_text() == "undecided\n"
    answers.write(record("a\nb/a.png", text="A star.\n\n- red \r\n  - large"))
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
    answers.write(record(str(elsewhere / "passwd")), record(str(elsewhere / "shadow")))

    assert answers.export("sidecars", force=True) == ExitCode.FAILED
    assert sorted(path.name for path in elsewhere.iterdir()) == ["passwd", "shadow"]
    told = capsys.readouterr().err
    assert "it is in no folder that texts may be written to" in told
    assert f"hint: 2 pictures not in `{answers.folder}`, where texts may be written; --below" in told
    assert f"--below {elsewhere}" in told
    assert answers.export("sidecars", below=(str(elsewhere),)) == ExitCode.OK
    assert (elsewhere / "passwd.txt").read_text() == "a star\n"

    # The current folder and that of the records are those of the job.
    monkeypatch.chdir(elsewhere)
    (answers.folder / "b.png").touch()
    answers.write(record("shadow"), record(str(answers.folder / "b.png")))
    assert answers.export("sidecars") == ExitCode.OK
    assert (elsewhere / "shadow.txt").exists()
    assert (answers.folder / "b.txt").exists()


@pytest.mark.parametrize("to", ["sidecars", "metadata"])
def test_where_one_text_has_place_several_prompts_are_refused(answers: Answers, to: str) -> None:
    answers.write(record(), record(prompt="Where?"))
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
    strange, gone = record(str(pictures / "a.png"), unfamiliar=True), record(str(pictures / "gone.png"))
    answers.write(gone, strange, asked(str(pictures / "sub/b.png"), 0.9), record("elsewhere.png", failed=True))

    assert answers.export("metadata", "pics") == ExitCode.FAILED
    told = capsys.readouterr().err
    assert "2 records in" in told
    assert "gone.png: there is no such file" in told
    lines = [json.loads(line) for line in (pictures / "metadata.jsonl").read_text().splitlines()]
    assert [(line["file_name"], line["text"]) for line in lines] == [("a.png", "a star"), ("sub/b.png", "Yes")]
    assert lines[0].keys() == lines[1].keys()
    assert [line["unfamiliar"] for line in lines] == [True, None]


def test_metadata_refuses_pictures_outside_of_its_folder_and_writes_nothing(answers: Answers) -> None:
    (answers.folder / "pics").mkdir()
    answers.write(record(str(answers.folder / "a.png")))

    with pytest.raises(UsageError):
        answers.export("metadata", "pics")
    assert list((answers.folder / "pics").iterdir()) == []


def test_two_spellings_of_a_path_are_one_picture(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(answers.folder)
    picture = answers.folder / "a.png"
    picture.touch()
    answers.write(record("a.png", text="one"), record(str(picture), text="two"))
    assert answers.export("kohya", "k.json") == ExitCode.OK
    assert json.loads((answers.folder / "k.json").read_text()) == {str(picture): {"caption": "two"}}


# Parquet


@pytest.mark.slow
def test_parquet_holds_every_record_with_the_runs(answers: Answers) -> None:
    import pyarrow.parquet as pq

    choice = {"all": 0.7, "half \ud800": 0.3}
    odd = record("inv\udcff.png", text="half \ud800", ms={"total": float("nan")}, unfamiliar=True, choice=choice)
    answers.write(record(), asked("b.png", 0.8), record("c.png", failed=True), odd)
    write_manifest(answers.path, manifest=RUN)

    assert answers.export("parquet", "out.parquet", abstain=(0.1, 0.9)) == ExitCode.OK
    caption, yes, failure, half = pq.read_table(answers.folder / "out.parquet").to_pylist()
    assert (caption["text"], caption["choice"], caption["decision"]) == ("a star", None, None)
    assert (yes["choice"], yes["decision"], yes["probability"]) == ([("Yes", 0.8), ("No", 0.2)], "undecided", 0.8)
    assert (failure["error_code"], failure["error_message"]) == ("truncated", "It is cut off.")
    assert (half["picture"], half["choice"]) == ("inv\\udcff.png", [("all", 0.7), ("half \\ud800", 0.3)])
    assert (half["text"], half["ms"]) == ("half \\ud800", [("total", None)])
    assert (caption["unfamiliar"], half["unfamiliar"]) == (None, True)
    metadata = pq.read_schema(answers.folder / "out.parquet").metadata
    assert json.loads(metadata[b"llama-adapter-runs"]) == [asdict(RUN)]


@pytest.mark.slow
def test_parquet_is_written_in_row_groups_and_shards_have_one_schema(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr("llama_adapter.app.jobs.exports.outputs.ROWS_IN_A_GROUP", 10)
    answers.write(*(record(f"{number}.png") for number in range(25)))
    answers.export("parquet", "a.parquet")
    answers.write()
    answers.export("parquet", "b.parquet")

    assert pq.read_metadata(answers.folder / "a.parquet").num_row_groups == 3
    assert pq.read_schema(answers.folder / "a.parquet").equals(pq.read_schema(answers.folder / "b.parquet"))
    assert pq.read_table(answers.folder / "b.parquet").num_rows == 0


def test_without_pyarrow_parquet_names_the_extra_before_any_work(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    answers.write(record())

    with pytest.raises(UsageError) as refusal:
        answers.export("parquet", "out.parquet")
    assert refusal.value.hint == install_hint("parquet")


# Parts


@pytest.mark.parametrize("to", ["csv", "jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_many_rows_can_be_divided_into_files_which_only_force_replaces(answers: Answers, to: str) -> None:
    answers.write(*(record(f"{number}.png") for number in range(7)))
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
    (answers.folder / "records").mkdir()
    write_manifest(answers.folder / "records", manifest=RUN)

    part = answers.write(record(), name="records/part-00000.jsonl")
    assert [found.run for found in runs_behind([Path(part), answers.path])] == ["run-1"]
