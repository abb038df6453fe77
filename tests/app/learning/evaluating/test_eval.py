"""`eval` of the embedded model: data in every form, faults in the data, resuming, and comparing two evaluations."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.jobs.questions import TemplateError
from llama_adapter.app.learning.evaluating.comparing import compare_with
from llama_adapter.app.learning.evaluating.data import DataSettings, read_data
from llama_adapter.app.learning.evaluating.outcomes import SavedOutcomes, ask_examples, read_outcomes, write_outcomes
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.scores.compare import Comparison
from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.models.checkpoints import StoredQuestions
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import ExitCode, UsageError
from tests.app.command import Run
from tests.app.learning.labelled import tables
from tests.app.learning.labelled.tables import write_lines
from tests.app.learning.scores.outcomes import outcome
from tests.app.models.bundles import edit_manifest
from tests.parity.exported import choice_limit

STAR, TRIANGLE = (sample_pictures() / name for name in ("12-red-star.jpg", "03-purple-triangle.png"))
QUESTIONS = str(sample_pictures() / "questions.jsonl")
ALL = "the model's question lists: name all classes with --choices"
IS_STAR, IS_RING = "Is there a red star?", "Is there a blue ring?"


class Folder:
    """A folder with labelled data, and its evaluation."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self._run = path, run

    def copy(self, picture: Path, name: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, self.path / name)

    def scores(self, *flags: str, code: int = ExitCode.OK) -> dict[str, Any]:
        """The JSON report on the folder."""
        out = self.path.parent / f"{self.path.name}-scores"
        ran = self._run("eval", str(self.path), "--out", str(out), "--reader", "thread", *flags)
        assert ran.code == code, ran.err
        return json.loads((out / "scores.json").read_text())


@pytest.fixture
def classes(tmp_path: Path, run: Run) -> Folder:
    """A picture in each of two folders."""
    data = Folder(tmp_path / "classes", run)
    data.copy(STAR, "star/1.jpg")
    data.copy(TRIANGLE, "triangle/1.png")
    return data


def value(figures: dict[str, Any], name: str) -> float:
    return figures[name]["value"]


@pytest.mark.slow
@pytest.mark.proves("eval", "CPU")
def test_a_known_set_and_captions_are_asked_and_scored_as_they_define_it(tmp_path: Path, run: Run) -> None:
    pope = Folder(tmp_path / "pope", run)
    pope.copy(STAR, "val2014/1.jpg")
    for kind in ("random", "adversarial"):
        lines = (
            {"image": "1.jpg", "text": asked, "label": label} for asked, label in ((IS_STAR, "yes"), (IS_RING, "no"))
        )
        write_lines(pope.path / f"coco_pope_{kind}.json", *lines)
    parts = pope.scores()["parts"]
    assert [*parts] == ["(all)", "adversarial", "random"]
    assert (value(parts["random"], "F1"), value(parts["random"], "share of yes")) == (1.0, 0.5)
    asked = (tmp_path / "pope-scores" / "answers.jsonl").read_text().splitlines()
    assert len(asked) == 2  # a question in both parts is asked once

    texts = "a small purple triangle at the top", "a big ship in the harbour"
    rows = ({"picture": str(picture), "text": text} for picture, text in zip((TRIANGLE, STAR), texts, strict=True))
    report = Folder(write_lines(tmp_path / "captions.jsonl", *rows), run).scores()
    assert report["task"] == "captions"
    assert [one["outcome"]["answer"] == texts[0] for one in report["worst"]] == [False, True]
    assert report["worst"][1]["score"] == pytest.approx(10.0)
    assert report["pictures"][0].startswith("data:image/jpeg;base64,")


@pytest.mark.slow
def test_pictures_that_cannot_be_read_are_left_out_counted_and_named(classes: Folder, run: Run) -> None:
    (classes.path / "star" / "2.jpg").write_text("no picture")
    (classes.path / "triangle" / "2.png").touch()
    question = ("--question", "What shape is the object?")
    report = classes.scores(*question, code=ExitCode.PICTURE_ERRORS)
    assert (report["num_examples"], value(report["figures"], "accuracy")) == (2, 1.0)
    assert report["notes"][1].startswith("Pictures that could not be read and are left out: 2 (")

    out = Path(f"{classes.path}-scores")
    ran = run("eval", str(classes.path), "--out", str(out), "--reader", "thread", *question)
    assert ran.code == ExitCode.PICTURE_ERRORS
    assert "0 questions answered, 2 answered by an earlier run" in ran.err
    assert json.loads((out / "scores.json").read_text()) == report
    assert "triangle/2.png: Wanted a picture, got zero bytes" in ran.err
    assert "| star | 1 | 0 |" in ran.out


@pytest.mark.slow
def test_a_run_continues_an_earlier_one_and_is_compared_with_another(tmp_path: Path, run: Run) -> None:
    def evaluate(*flags: str) -> tuple[str, str]:
        ran = run("eval", QUESTIONS, "--task", "open", "--reader", "thread", *flags)
        assert ran.code == ExitCode.OK, ran.err
        return ran.out, ran.err

    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    evaluate("--limit", "10", "--out", one)
    out, err = evaluate("--out", one)
    assert "324 questions answered, 6 answered by an earlier run" in err
    assert "| exact | 100.0% | 89.3% to 100.0% | 330 |" in out, "the model answers all questions of the samples"

    out, err = evaluate("--limit", "30", "--out", other, "--max-new-tokens", "0", "--against", one)
    assert "note: 301 answers to examples that one of the two lacks are not compared" in err
    assert "| one right | 0 | 29 |" in out
    assert "| exact | 100.0% | 0.0% | -100.0% |" in out


@pytest.mark.slow
def test_other_words_of_a_question_are_compared_and_named(classes: Folder, tmp_path: Path, run: Run) -> None:
    evaluate, one, other = ("eval", str(classes.path), "--reader", "thread"), tmp_path / "one", tmp_path / "other"
    first, second = "What shape is the object?", "What colour is *it*?"
    assert run(*evaluate, "--question", first, "--out", str(one)).code == ExitCode.OK
    ran = run(*evaluate, "--question", second, "--out", str(other), "--against", str(one))

    assert ran.code == ExitCode.OK, ran.err
    note = f"The questions differ: one was asked “{first}”, other was asked “{second}”."
    assert note.replace("*", "\\*") in ran.out
    assert json.loads((other / "scores.json").read_text())["comparison"]["note"] == note
    assert "not compared" not in ran.err


def test_the_model_is_asked_for_its_question_only_for_examples_of_the_chosen_split(tmp_path: Path) -> None:
    """The table is in another folder than its pictures."""
    shutil.copy(STAR, tmp_path / "star.jpg")
    asked = {"picture": "star.jpg", "question": IS_STAR, "answer": "yes", "split": "test"}
    bare = {"picture": "star.jpg", "answer": "star", "split": "train"}
    table = write_lines(tmp_path / "tables" / "data.jsonl", asked, bare)
    settings = DataSettings(data=(str(table),), picture_folder=str(tmp_path))

    def stored() -> StoredQuestions:
        return StoredQuestions(question="What is it?")

    of_split = {
        split: read_data(replace(settings, split=split), stored=stored).model_questions
        for split in ("test", "train", "all")
    }
    assert of_split == {"test": {}, "train": {"examples": "What is it?"}, "all": {"examples": "What is it?"}}


@pytest.mark.parametrize(("limit", "number"), [(1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (6, 6), (7, 6)])
def test_the_questions_of_a_picture_are_drawn_together(limit: int, number: int, classes: Folder) -> None:
    names = [f"classes/{name}" for name in ("star/1.jpg", "triangle/1.png")]
    (classes.path / "more.png").write_bytes((classes.path / "triangle" / "1.png").read_bytes() + b"\n")
    rows = (
        {"picture": name, "question": asked, "answer": "yes"} for asked in "ab" for name in [*names, "classes/more.png"]
    )
    table = write_lines(classes.path.parent / "t.jsonl", *rows)
    found = read_data(DataSettings(data=(str(table),), limit=limit), stored=StoredQuestions).examples
    assert len(found) == number
    assert len({one.digest for one in found}) == -(-number // 2)


@pytest.mark.parametrize(
    ("listed", "choices", "missing"),
    [
        ("ring, star, triangle", None, "ring"),  # no picture is of a ring
        ("ring, star, tsar, triangle", None, "ring, tsar"),
        ("tsar, triangle", None, "tsar"),  # with the letters of star
        ("ring, star, triangle", ("triangle", "star", "ring"), None),
        ("star, triangle", None, None),
        ("star, triangle", ("star", "triangle", "ring"), None),
        ("star, triangle", ("star", "triangle", *map(str, range(10))), None),
        ("star, triangle, big, red", ("triangle", "big, red", "star"), None),
        ("", None, None),
    ],
)
def test_it_is_told_that_answers_are_compared_with_fewer_classes_than_a_model_learned(
    classes: Folder, listed: str, choices: tuple[str, ...] | None, missing: str | None
) -> None:
    settings, question = DataSettings(data=(str(classes.path),), choices=choices), "Which class is this?"
    stored = StoredQuestions(question=f"Which of these is it: {listed}?" if listed else question)
    warnings = [one for one in read_data(settings, stored=lambda: stored).warnings if "compared" in one]
    place = "the classes of the data: answers are not compared with"
    assert warnings == ([] if missing is None else [f"{place} {missing}, which {ALL}"])


def test_choices_of_questions_in_the_data_need_no_class_of_the_model(tmp_path: Path) -> None:
    for name, picture in (("disc", STAR), ("ring", TRIANGLE)):
        shutil.copy(picture, tmp_path / name)
    asked = {"picture": "disc", "question": IS_STAR, "choices": ["yes", "no"], "answer": "yes"}
    bare = [{"picture": name, "choices": ["star", name], "answer": "star"} for name in ("disc", "ring")]

    def warnings(question: str, *rows: dict[str, Any]) -> list[str]:
        table = write_lines(tmp_path / "data.jsonl", *rows)
        found = read_data(DataSettings(data=(str(table),)), stored=lambda: StoredQuestions(question=question))
        return [one for one in found.warnings if "compared" in one]

    assert warnings("Which of these is it: ring, star?", asked, bare[1]) == []
    [told] = warnings("Which of these is it: disc, ring, star?", asked, *bare)
    assert "compared with disc, ring, which" in told


@pytest.mark.slow
@pytest.mark.usefixtures("classes")
def test_the_question_that_a_model_stores_is_asked_where_there_is_no_other(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(embedded_model(), "tuned")
    star = {"picture": "classes/star/1.jpg"}
    write_lines(tmp_path / "own.jsonl", {**star, "question": IS_STAR, "answer": "yes", "choices": ["yes", "no"]})
    write_lines(tmp_path / "captions.jsonl", {**star, "text": "a star of a red colour"})
    stored, prompt = "What is {this}?", "Describe the picture."
    edit_manifest(question=stored, prompt=prompt)(tmp_path / "tuned")

    def scored(data: str, *flags: str) -> tuple[set[str], bool, bool]:
        ran = run("eval", data, *flags, "--model", "tuned", "--out", "scores", "--overwrite", "--reader", "thread")
        assert ran.code == ExitCode.OK, ran.err
        said = "without a question are asked “"
        asked = {one.question for one in read_outcomes(Path("scores/outcomes.jsonl")).outcomes}
        return asked, f"note: {told}" in ran.err, said in ran.out

    told = f"examples without a question are asked “{stored}”, the default question of `tuned`"
    assert scored("classes") == ({stored}, True, True), "braces are no variables"
    assert scored("classes", "--quiet") == ({stored}, False, True)
    assert scored("classes", "--question", "Which shape?") == ({"Which shape?"}, False, False)
    assert scored("own.jsonl") == ({IS_STAR}, False, False)
    told = f"captions without a question are asked “{prompt}”, the default question of `tuned`"
    assert scored("captions.jsonl") == ({prompt}, True, True)
    assert scored("captions.jsonl", "--question", "Say it.") == ({"Say it."}, False, False)

    edit_manifest(question=3)(tmp_path / "tuned")
    ran = run("eval", "classes", "--model", "tuned", "--out", "scores")
    assert (ran.code, "is incomplete or wrong in `question`" in ran.err) == (ExitCode.FAILED, True)


def asked(question: str, right: str, *, digest: str = "a", part: str = "") -> Outcome:
    return outcome("yes", right, question=question, digest=digest, part=part)


def test_examples_of_a_picture_are_told_apart_by_their_answers_where_questions_differ() -> None:
    def comparison(first: list[Outcome], second: list[Outcome]) -> Comparison:
        saved = [
            SavedOutcomes(model=name, task="open", outcomes=tuple(of)) for name, of in (("m", first), ("n", second))
        ]
        return compare_with(*saved, path="one", out="two", draws=Draws(count=0))

    def compared(first: list[Outcome], second: list[Outcome]) -> tuple[int, str]:
        found = comparison(first, second)
        return found.num_examples, found.note

    worded = [asked("Red?", "yes"), asked("Blue?", "no"), asked("Red?", "yes", digest="b")]
    others = [asked("Is it blue?", "no"), asked("Is it red?", "yes", digest="b"), asked("Is it red?", "yes")]
    assert compared(worded, others) == (
        3,
        "The questions differ in 2 ways, such as: m was asked “Red?”, n was asked “Is it red?”.",
    )
    one_way = "The questions differ: m was asked “Red?”, n was asked “Is it red?”."
    assert compared(worded[:1], others[2:]) == (1, one_way)
    in_other_order = [asked("Blue?", "no"), replace(asked("Red?", "yes"), answer="no"), asked("Red?", "yes")]
    mcnemar = comparison([asked("Red?", "yes"), asked("Blue?", "no")], in_other_order).mcnemar
    assert (mcnemar.num_one_right, mcnemar.num_other_right, mcnemar.num_both_wrong) == (1, 0, 1), "the first of two"
    twice = [*others, asked("Is it round?", "yes")]
    assert compared(worded, twice)[0] == 2, "two questions with the same answer about one picture"
    assert compared(worded, [*others, asked("Red?", "yes")]) == (1, ""), "the same question is enough"
    for strange in ([asked("Red?", "maybe")], [asked("Is it red?", "yes", part="x")]):
        with pytest.raises(UsageError, match="no example is in both"):
            compared(worded, strange)


WRONG = {
    "no question": ["classes", "--model", str(embedded_model())],
    "a variable": ["classes", "--question", "Is it {size}?"],
    "no such split": ["classes", "--question", "?", "--split", "test"],
    "a malformed row": ["table.jsonl"],
    "choices of some": ["mixed.jsonl"],
    "no choices": [QUESTIONS, "--task", "choices"],
    "an answer that is no choice": ["classes", "--question", "?", "--choices", "star,ring"],
    "nothing to compare with": ["classes", "--question", "?", "--against", "classes"],
    "another question": ["classes", "--question", "?", "--against", "earlier"],
    "another task": [QUESTIONS, "--against", "earlier"],
    "no data": ["nothing"],
}


@pytest.mark.usefixtures("classes")
def test_what_is_wrong_is_said_before_the_model_is_loaded(
    tmp_path: Path, run: Run, snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    star = {"picture": "classes/star/1.jpg", "question": IS_STAR, "answer": "yes"}
    write_lines(tmp_path / "table.jsonl", star, {"picture": "classes/star/1.jpg", "question": IS_RING, "answer": {}})
    write_lines(tmp_path / "mixed.jsonl", star, {**star, "question": IS_RING, "answer": "no", "choices": ["yes", "no"]})
    (tmp_path / "earlier").mkdir()
    other = outcome("star", "star", picture="a", question="Else?", choices=("star", "ring"))
    saved = SavedOutcomes(model="a", task="choices", outcomes=(other,))
    write_outcomes(saved, tmp_path / "earlier" / "outcomes.jsonl")

    said = {}
    for name, flags in WRONG.items():
        ran = run("eval", "--model", "no-such-model", *flags, "--out", "out")
        assert ran.code == ExitCode.USAGE, ran.err
        said[name] = ran.told.replace(str(sample_pictures()), "SAMPLES")
    assert said == snapshot
    assert not (tmp_path / "out").exists()


def test_outcomes_are_read_as_they_were_written_and_anything_else_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    one = outcome("a", "a", "b", picture="\udcff.png", question="q", choices=("a", "b"), probabilities=(1.0, 0.0))
    saved = SavedOutcomes(model="m", task="choices", outcomes=(one, outcome("a", "a", question="q")))
    write_outcomes(saved, path)
    assert read_outcomes(path) == saved

    head, first, _ = path.read_text().splitlines()
    for text, line in (
        ("", 1),
        ("[1]", 1),
        (head.replace("llama-adapter-outcomes", "x"), 1),
        (f"{head}\n{first}\nx", 3),
        (f"{head}\n{first.replace('[1.0, 0.0]', '[2.0, 0.0]')}", 2),
        (f"{head}\n{first.replace('[1.0, 0.0]', '[1.0]')}", 2),
        (f"{head}\n" + '{"picture": 1}', 2),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=f"line {line}"):
            read_outcomes(path)


GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def captioner() -> Iterator[Captioner]:
    with Captioner.load() as captioner:
        yield captioner


def example(instruction: str | None, answer: str, *, name: str | None = "12-red-star.jpg") -> Example:
    source = None if name is None else str(sample_pictures() / name)
    return tables.example(answer, source=source, instruction=instruction, columns={"color": "red"})


def test_choices_are_scored_and_other_answers_generated_in_the_order_of_the_examples(captioner: Captioner) -> None:
    red = example("Is there a {color} star?", "yes")
    chosen = dataclasses.replace(red, choices=("no", "yes"), task="choice")
    other = example(None, "a small purple triangle at the top", name="03-purple-triangle.png")
    caption = dataclasses.replace(other, task="caption")
    text = dataclasses.replace(example("Say {x}", "x", name=None), choices=("x", "y"))
    found = ask_examples(captioner, [chosen, caption, red, text], sampling=GREEDY)

    assert [one.answer for one in found[:3]] == ["yes", "a small purple triangle at the top", "yes"]
    assert [one.question for one in found] == [
        *("Is there a red star?", captioner.info.default_prompt, "Is there a red star?"),
        "Say {x}",  # no picture, so no variables
    ]
    direct = captioner.ask(str(chosen.item.source), "Is there a red star?", choices=["no", "yes"])
    assert found[0].probabilities == pytest.approx(tuple(direct.choice.values()), rel=choice_limit())
    assert found[0].choices == ("no", "yes")
    assert found[2].probabilities is None
    assert found[3].picture == ""
    assert found[3].probabilities == pytest.approx(
        tuple((captioner.generate_text("Say {x}", choices=["x", "y"])[0].choice or {}).values()), rel=choice_limit()
    )


def test_unreadable_pictures_are_left_out_and_what_the_model_cannot_answer_is_wrong(captioner: Captioner) -> None:
    long = dataclasses.replace(example("Is it? " * 1000, "yes"), choices=("yes", "no"))
    missing = example("Is it red?", "yes", name="missing.png")
    found = ask_examples(captioner, [missing, long, example("What color is the star?", "red")], sampling=GREEDY)

    assert [(one.answer, one.probabilities) for one in found] == [("", None), ("red", None)]


def test_a_variable_that_an_example_lacks_is_an_error_before_anything_is_asked(captioner: Captioner) -> None:
    with pytest.raises(TemplateError, match="size"):
        ask_examples(captioner, [example("Is it {size}?", "yes")], sampling=GREEDY)
