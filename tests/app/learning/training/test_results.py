"""Results of a run: the score and its name, a card that shows text of users as text, curves of any log."""

import math
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome, Task
from llama_adapter.app.learning.scores.scoring import Scores, score
from llama_adapter.app.learning.training import scoring
from llama_adapter.app.learning.training.checkpoint import LoopState
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.loop import Ended
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.learning.training.ranks import OneRank
from llama_adapter.app.learning.training.results import (
    CARD,
    DATA,
    draw,
    num_known,
    require_same_run,
    write_beginning,
    write_card,
)
from llama_adapter.app.learning.training.run_log import draw_curves
from llama_adapter.app.learning.training.scoring import Validator, headline, shown_test
from llama_adapter.app.learning.training.yardstick import Yardstick, measure_answers
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_text
from tests.app.learning.scores.outcomes import outcome
from tests.app.learning.training.pets import draw_pets, job_of, prepared
from tests.markdown import NASTY, elements_of


def card_of(
    job: TrainJob, data: TrainingData, *, name: str, scores: Sequence[Scores] = (), yardstick: Yardstick | None = None
) -> str:
    """The card of a run; `name` stands for the model and for texts."""
    model = SimpleNamespace(sources=SimpleNamespace(name=name), dtype=torch.float32, counts=dict)
    ended, nothing = Ended(state=LoopState(), why=name), {"unreadable": (), "unscored": "", "bundle": None}
    measured = {"scores": scores, "memory": name, "yardstick": yardstick, "verdict": name}
    write_card(job, model, data, ended=ended, **measured, **nothing)
    return (job.folder / CARD).read_text()


def test_examples_of_all_classes_are_scored_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders by class are read one after the other, so the first thousand examples may be of one class."""
    nothing, places = cast(Any, None), cast(list[Any], list(range(5000)))
    seen: list[int] = []
    monkeypatch.setattr(scoring, "answered", lambda captioner, examples: seen.extend(examples) or {})
    monkeypatch.setattr(Validator, "_loss", lambda self: None)
    Validator(nothing, places, encodings=nothing, rows=1, ranks=OneRank(), open_captioner=nullcontext)()
    assert seen == sorted(set(seen))
    assert len(seen) == 1000
    assert all(120 < sum(place // 1000 == name for place in seen) < 280 for name in range(5))


def test_a_card_shows_labels_and_names_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "<i>`|[x](y)*_a_*"
    labels = (*NASTY[::3], "<b>|`*_[x](javascript:alert(1))_*`|</b>\n# x", "plain")
    draw_pets(tmp_path / "pets", each=6 * len(labels))
    rows = [
        {"image": f"pets/ring/{number}.png", "question": f"```\n{label}?", "answer": label}
        for number, label in enumerate(labels * 6)
    ]
    data = prepared(job_of(tmp_path, *rows))
    job = TrainJob(data=(f"{name}.jsonl",), out=f"{name}.pth").with_rate(width=64)
    outcomes = [Outcome(picture=one, question=one, answer="no", references=labels[:3], part=one) for one in labels]
    job.folder.mkdir()
    card = card_of(
        job,
        data,
        name=name,
        scores=[score(outcomes, model=name)],
        yardstick=measure_answers([("", labels)], [("", labels)]),
    )
    elements, texts = elements_of(card)
    table_elements = {"table", "thead", "tbody", "tr", "th", "td"}
    assert set(elements) == table_elements | {"h1", "h2", "h3", "h4", "p", "ul", "li", "code", "strong"}
    assert elements.count("h1") == 1
    shown = [shown_text(label).strip(" ") for label in labels]
    assert {label: texts.count(label) >= 2 for label in shown} == dict.fromkeys(shown, True)  # an answer and a part
    assert texts.count(name) == 3  # title, memory and verdict
    assert re.search(r"\| versions \| python [\d.]+, torch [^|]*[^ ,] \|", card)
    assert f"An adapter for {name}, trained with llama-adapter train." in texts


def test_a_run_whose_data_cannot_be_read_is_checked_later(tmp_path: Path) -> None:
    for damaged in (b"", b"{", b"[]", b"{}", b"\xff"):
        (tmp_path / DATA).write_bytes(damaged)
        require_same_run(tmp_path, "a")

    (tmp_path / DATA).write_bytes(b'{"run": "b"}')
    with pytest.raises(UsageError, match="another model, data, examples, settings or version"):
        require_same_run(tmp_path, "a")


@pytest.mark.parametrize("way", ["bundle", "adapter"])
def test_test_pictures_that_the_model_learned_in_an_earlier_run_are_counted(way: str, tmp_path: Path) -> None:
    draw_pets(tmp_path / "pets", each=8)
    job = TrainJob(data=(str(tmp_path / "pets"),), out=str(tmp_path / "a.pth"))
    further = replace(job, spec=CaptionerSpec(llama_dir="x", adapter=job.out)) if way == "adapter" else job
    model = SimpleNamespace(sources=SimpleNamespace(bundle=str(job.folder / "bundle") if way == "bundle" else None))
    data = prepared(job)
    assert num_known(further, model, data) == 0, "there is no such run"
    for before, count in ((data, 0), (replace(data, train=data.test, test=data.train), len(data.test))):
        write_beginning(job, before, run="a")
        assert num_known(further, model, data) == count


@pytest.mark.parametrize(("column", "are_classes"), [("text", False), ("label", True)])
def test_answers_are_counted_and_captions_are_not(column: str, are_classes: bool, tmp_path: Path) -> None:
    pictures = sorted(draw_pets(tmp_path / "pets", each=6).rglob("*.png"))
    job = job_of(tmp_path, *({"image": str(path), column: path.parent.name} for path in pictures))
    data = prepared(job)
    assert (data.few_of_classes() is not None) == are_classes
    job.folder.mkdir()
    assert ("| answer | learn |" in card_of(job, data, name="a")) == are_classes


@pytest.mark.parametrize(
    ("num_learned", "num_tested", "said"),
    [
        (10, 3, None),
        (9, 3, "triangle (9 to learn and 3 for the test); with fewer than 10 to learn and 3 for the test, "),
        (10, 2, "triangle (10 to learn and 2 for the test); with fewer than 10 to learn and 3 for the test, "),
        (9, 0, "triangle (9 to learn); with fewer than 10 to learn, "),
        (10, 0, None),
    ],
)
def test_classes_with_few_examples_are_named_once(
    num_learned: int, num_tested: int, said: str | None, tmp_path: Path
) -> None:
    """The other class has enough. Two questions about a picture are one example of its class."""
    wanted = {"ring": (12, 4 if num_tested else 0), "triangle": (num_learned, num_tested)}
    draw_pets(tmp_path / "pets", each=16)
    rows = [
        {"image": f"pets/{name}/{number}.png", "label": name, "question": question, "split": split}
        for name, (learned, tested) in wanted.items()
        for number, split in enumerate(["train"] * learned + ["test"] * tested)
        for question in ("What is it?", "Which is it?")
    ]
    found = prepared(job_of(tmp_path, *rows, validation=0.0, test=0.0)).few_of_classes()

    assert (found is None) == (said is None)
    assert said is None or f"these classes have few examples: {said}" in (found or "")


@pytest.mark.parametrize(
    ("losses", "validation", "smoothed", "scale"),
    [
        ([], {}, [], "linear"),
        ([2.0], {}, [2.0], "linear"),
        ([2.0, 4.0], {}, [2.0, 5.8 / 1.9], "linear"),
        ([0.0, 5.0], {}, [0.0, 5.0 / 1.9], "linear"),
        ([2.0, 100.0], {}, [2.0, 101.8 / 1.9], "log"),
        ([2.0, math.nan, 4.0], {}, [2.0, 2.0, 5.8 / 1.9], "linear"),
        ([2.0, math.nan, 100.0], {}, [2.0, 2.0, 101.8 / 1.9], "log"),
        ([math.inf, 2.0], {}, [math.nan, 2.0], "linear"),
        ([2.0, 2.0], {"validation_loss": "3.5"}, [2.0, 2.0], "linear"),
        ([2.0, 2.0], {"validation_loss": "3.5", "validation_score": "0.5"}, [2.0, 2.0], "linear"),
    ],
)
def test_curves_are_drawn_of_any_log(
    losses: list[float],
    validation: dict[str, str],
    smoothed: list[float],
    scale: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The validation is that of the last row."""
    from matplotlib.figure import Figure

    figures, save = list[Any](), Figure.savefig

    def kept(figure: Figure, *given: Any, **named: Any) -> None:
        figures.append(figure)
        save(figure, *given, **named)

    monkeypatch.setattr(Figure, "savefig", kept)
    rows = [{"step": str(number), "loss": str(loss), "lr": "0.1"} for number, loss in enumerate(losses, 1)]
    for row in rows[-1:]:
        row |= validation

    assert draw_curves(rows, tmp_path / "curves.png", title="pets")

    losses_shown, *scores_shown, rates_shown = figures[0].axes
    _, training, *others = losses_shown.lines
    assert losses_shown.get_yscale() == scale
    assert training.get_ydata() == pytest.approx(smoothed, nan_ok=True)
    assert [one.get_xydata().tolist() for one in others] == [[[2, 3.5]]] * ("validation_loss" in validation)
    assert [one.get_ylabel() for one in scores_shown] == ["score"] * ("validation_score" in validation)
    assert rates_shown.lines[0].get_ydata().tolist() == [0.1] * len(losses)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_note_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draw(TrainJob(data=("a",), out=str(tmp_path / "a.pth")))
    said = capsys.readouterr().err
    assert said.startswith("note: `curves.png` is not drawn, because matplotlib is not installed. Install it:\n")
    assert "[train]'" in said


CHOICES = [outcome("a", right, choices=("a", "b")) for right in "ab"]
OPEN = [outcome("The dog.", "dog"), outcome("cat", "dog"), outcome("cat", "dog")]
SAME = "a red star at the left"
CAPTIONS = [outcome(SAME, SAME), outcome(SAME, SAME)]  # words of all examples have the weight 0


@pytest.mark.parametrize(
    ("outcomes", "score", "name"),
    [
        ({}, 0.0, "score"),
        ({"choices": CHOICES}, 0.5, "accuracy"),
        ({"open": OPEN}, 1 / 3, "right answers"),
        ({"captions": CAPTIONS}, 0.0, "CIDEr-D"),
        ({"choices": CHOICES, "open": OPEN}, 0.4, "mean of accuracy and right answers"),
    ],
)
def test_the_score_is_the_mean_over_examples_and_has_a_name(
    outcomes: dict[Task, list[Outcome]], score: float, name: str
) -> None:
    assert headline(outcomes) == (pytest.approx(score), name)


BALANCED = "examples; balanced accuracy"


def common_and_rare(num_common: int, *, rare: int = 1, answer: str = "a") -> list[Outcome]:
    """Right answers about a common class, and the `answer` to each question about the rare class `b`."""
    labels = [("a", "a")] * num_common + [(answer, "b")] * rare
    return [outcome(given, right, picture=f"{i}", choices=("a", "b")) for i, (given, right) in enumerate(labels)]


@pytest.mark.parametrize(
    ("outcomes", "end"),
    [
        (common_and_rare(20), f"0.952 of 21 {BALANCED} 0.500, as classes have 1 to 20 examples"),
        (common_and_rare(7, rare=2, answer="b"), f"1.000 of 9 {BALANCED} 1.000, as classes have 2 to 7 examples"),
        (common_and_rare(6, rare=2), "accuracy 0.750 of 8 examples"),
        (common_and_rare(4, rare=0), "1.000 of 4 examples; it says nothing about b, without examples in the test"),
        (
            [replace(one, choices=(*"abcd",)) for one in common_and_rare(20)],
            "as classes have 1 to 20 examples; it says nothing about 2 of 4 classes, without examples in the test",
        ),
        (OPEN, "test: normalised 0.333 of 3 examples"),
    ],
)
def test_classes_of_unequal_sizes_have_their_balanced_accuracy_beside(outcomes: list[Outcome], end: str) -> None:
    assert shown_test(score(outcomes, draws=Draws(count=0))).endswith(end)
