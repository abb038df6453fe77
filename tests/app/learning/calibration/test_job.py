"""`ask --calibrate` on the embedded model: labelled pictures give a calibration that other commands use."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.decisions.calibration import read_calibration
from llama_adapter.app.learning.calibration.calibrate import CalibrationJob, _chosen, read_labelled, run_calibration
from llama_adapter.app.learning.evaluating.outcomes import question_of
from llama_adapter.app.models.checkpoints import StoredQuestions
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.problems import describe
from tests.app.pictures.inputs.files import fill, tar_bytes


def job_on(path: Path, **settings: Any) -> CalibrationJob:
    fields = {"spec": CaptionerSpec(), "calibrate": str(path), "calibration_out": "c.json", "choices": ("yes", "no")}
    return CalibrationJob(**fields | settings)


class Labels:
    """Labels for the sample pictures' yes-or-no questions, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = (sample_pictures() / "questions.jsonl").read_text().splitlines()
        known = [line for line in map(json.loads, lines) if line["answer"] in ("yes", "no")]
        self.rows = [(str(sample_pictures() / line["picture"]), line["question"], line["answer"]) for line in known]

    def calibrate(self, **settings: Any) -> int:
        with open(self.folder / "labels.csv", "w", newline="") as file:
            csv.writer(file).writerows([("picture", "question", "label"), *self.rows])
        usual = {"calibration_out": str(self.folder / "c.json"), "reader": "thread", "quiet": True}
        return run_calibration(job_on(self.folder / "labels.csv", **usual | settings))


@pytest.fixture
def labels(tmp_path: Path) -> Labels:
    return Labels(tmp_path)


@pytest.mark.slow
@pytest.mark.proves("calibration of choices", "CPU")
def test_the_embedded_model_is_right_about_its_sample_pictures(
    labels: Labels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert labels.calibrate(plot=str(labels.folder / "plot.png"), reader="process") == ExitCode.OK

    found = read_calibration(str(labels.folder / "c.json"))
    assert (found.num_examples, found.before.accuracy, found.question) == (len(labels.rows), 1.0, None)
    assert (found.threshold.precision, found.threshold.recall) == (1.0, 1.0)
    assert (labels.folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "100.0% right" in capsys.readouterr().out


@pytest.mark.slow
def test_wrong_labels_are_listed_and_pictures_that_cannot_be_read_are_counted(
    labels: Labels, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, question, answer = labels.rows[4]
    labels.rows[4] = (picture, question, "no" if answer == "yes" else "yes")
    (labels.folder / "broken.png").write_bytes(b"no picture")
    labels.rows += [("broken.png", "Is there a red star?", "yes"), ("missing.png", "Is there a red star?", "no")]

    assert labels.calibrate() == ExitCode.PICTURE_ERRORS
    found = read_calibration(str(labels.folder / "c.json"))
    assert (found.num_examples, found.num_unreadable) == (len(labels.rows) - 2, 2)
    assert found.temperature > 1.5
    assert found.after.nll < found.before.nll
    out, talk = capsys.readouterr()
    assert "most confident first:\n  line 6, " in out
    assert "2 could not be answered" in out
    assert talk.count("error: ") == 2


@pytest.mark.slow
def test_figures_do_not_depend_on_whether_the_rows_of_a_picture_are_together(labels: Labels) -> None:
    wrong = {"yes": "no", "no": "yes"}
    rows = [(*asked, wrong[label] if index < 3 else label) for index, (*asked, label) in enumerate(labels.rows)]
    later = [row for row in rows[1:] if row[0] == rows[0][0]]
    found = []
    for labels.rows in (rows, [row for row in rows if row not in later] + later):
        assert labels.calibrate(force=True) == ExitCode.OK
        found.append(read_calibration(str(labels.folder / "c.json")).held_out)
    together, apart = found
    assert apart.nll == pytest.approx(together.nll, rel=1e-6)


@pytest.mark.slow
def test_copies_are_one_picture_and_a_choice_that_is_never_right_has_no_recall(
    labels: Labels, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, question, _ = next(row for row in labels.rows if row[2] == "yes")
    for name in ("a.png", "b.png", "c.png"):
        shutil.copy(picture, labels.folder / name)
    labels.rows = [(name, question, "yes") for name in ("a.png", "b.png", "c.png")]
    assert labels.calibrate() == ExitCode.OK
    assert read_calibration(str(labels.folder / "c.json")).promise.num_pictures == 1
    assert "they are about 1 " in capsys.readouterr().out

    labels.rows = [(picture, question, "no")]
    assert labels.calibrate(force=True) == ExitCode.OK
    assert "has 0.0%, recall -, 1 of 1 examples" in capsys.readouterr().out


@pytest.mark.slow
def test_where_no_picture_can_be_read_nothing_is_written(labels: Labels) -> None:
    labels.rows = [("missing.png", "Is there a red star?", "no")]

    assert labels.calibrate() == ExitCode.FAILED
    assert not (labels.folder / "c.json").exists()


@pytest.mark.slow
def test_only_the_named_pictures_count_and_one_question_may_stand_for_all(labels: Labels) -> None:
    labels.rows = [(picture, "", "no") for picture in dict.fromkeys(picture for picture, *_ in labels.rows)]
    named = tuple(row[0] for row in labels.rows[:3])

    labels.calibrate(pictures=named, question="Is there a red circle?")
    found = read_calibration(str(labels.folder / "c.json"))
    assert (found.num_examples, found.question) == (3, "Is there a red circle?")


@pytest.mark.parametrize(
    ("data", "named", "chosen"),
    [
        ("data.tar", "data.tar", ["a1.png", "b1.png"]),
        ("classes", "classes/*/a*.png", ["a1.png", "a2.png"]),
        ("classes", "classes/no", ["b1.png"]),
    ],
)
def test_pictures_are_named_as_archives_patterns_and_folders(
    tmp_path: Path, data: str, named: str, chosen: list[str]
) -> None:
    members = {"a1.png": b"1", "a1.cls": b"yes", "b1.png": b"2", "b1.cls": b"no"}
    (tmp_path / "data.tar").write_bytes(tar_bytes(members))
    fill(tmp_path / "classes", "yes/a1.png", "no/b1.png", "yes/a2.png")
    job = job_on(tmp_path / data, question="Is it?", pictures=(str(tmp_path / named),))

    found = _chosen(job, read_labelled(job.calibrate, choices=job.choices))

    assert sorted(Path(one.item.label).name for one in found) == chosen


@pytest.mark.parametrize("question", [None, "Is it {this}?"])
def test_examples_without_a_question_are_asked_that_which_the_model_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], question: str | None
) -> None:
    stored = StoredQuestions(question="Is it {stored}?")
    monkeypatch.setattr("llama_adapter.app.learning.calibration.calibrate.stored_questions", lambda _: stored)
    fill(tmp_path / "classes", "yes/a1.png", "no/b1.png")
    job = job_on(tmp_path / "classes", question=question)

    found = _chosen(job, read_labelled(job.calibrate, choices=job.choices))

    told = "are asked “Is it {stored}?”, the default question of the embedded model" in capsys.readouterr().err
    if question is None:
        assert {question_of(one, question=None).instruction for one in found} == {"Is it {stored}?"}
        assert told
    else:
        assert {one.question.instruction for one in found} == {None}, "the job's question is asked"
        assert not told


def test_a_row_without_a_picture_is_a_fault_and_one_without_a_label_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other faults are those of all labelled data."""
    table = tmp_path / "l.csv"
    table.write_text("picture,label,split\na.png,yes,train\nb.png,,\nc.png,no,val\n")
    assert [one.answers for one in read_labelled(str(table), choices=("Yes", "No"))] == [("Yes",), ("No",)]
    told = capsys.readouterr().err
    assert "note: left out of the data: rows without an answer: 1" in told
    assert "examples of the split train: 1; a threshold from pictures that the model learned promises too much" in told
    table.write_text("question,label\nRed?,yes\n")
    with pytest.raises(InputsError) as refused:
        read_labelled(str(table), choices=("Yes", "No"))
    assert "l.csv, line 2: it has no picture in a column picture" in refused.value.details[0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"choices": ("left", "right")}, "Wanted labelled data without errors, got 52: [correct or remove these]"),
        (
            {"pictures": ("elsewhere.png",)},
            "None of these pictures is in `FOLDER/labels.csv` [name no pictures to use the whole table]",
        ),
        ({"plot": "plot.txt"}, "--plot writes .png or .svg, got `plot.txt` []"),
        (
            {"calibration_out": "/proc/c.json"},
            "No such file or directory: `/proc/c.json` [check the path, its permissions and the disk]",
        ),
        (
            {"calibration_out": __file__},
            "`FILE` exists already [replace it with --force, or name another file as --calibration-out or --plot]",
        ),
        (
            {"prompts": False},
            "Wanted a question for every example, but 32 of 32 have none, such as FOLDER/labels.csv, line 2 [pass one "
            "for these as --question]",
        ),
    ],
    ids=["choices", "pictures", "plot", "folder", "existing file", "prompts"],
)
def test_unusable_settings_are_refused_before_a_model_is_loaded(
    labels: Labels, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(
        "llama_adapter.app.learning.calibration.calibrate.Captioner.from_spec", lambda _: pytest.fail("loaded")
    )
    if not settings.get("prompts", True):
        labels.rows = [(picture, "", "no") for picture, *_ in labels.rows]

    with pytest.raises((InputsError, UsageError, OSError)) as refused:
        labels.calibrate(**{name: value for name, value in settings.items() if name != "prompts"})
    problem = describe(refused.value)
    said = f"{problem.sentence} [{problem.hint}]"
    assert said.replace(str(labels.folder), "FOLDER").replace(__file__, "FILE") == told


@pytest.mark.parametrize("precision", [0.0, 1.1, float("nan")])
def test_a_precision_out_of_range_is_refused(labels: Labels, precision: float) -> None:
    with pytest.raises(ValueError, match="target_precision"):
        labels.calibrate(target_precision=precision)
