"""All figures of a data set: parts, classes, MME's totals and the worst answers."""

from dataclasses import replace

import pytest

from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.scoring import MME_COGNITION, MME_PERCEPTION, score
from llama_adapter.runtime.errors import UsageError

FEW = Draws(count=20)


def asked(answer: str, right: str, *, digest: str = "", part: str = "", sure: float | None = None) -> Outcome:
    return Outcome(
        picture="",
        question="?",
        answer=answer,
        references=(right,),
        choices=("yes", "no"),
        probabilities=None if sure is None else ((sure, 1 - sure) if answer == "yes" else (1 - sure, sure)),
        digest=digest,
        part=part,
    )


def test_popes_table_has_a_row_for_each_part_and_one_for_all() -> None:
    found = score(
        [asked("yes", "yes", part="random"), asked("yes", "no", part="random"), asked("no", "no", part="popular")],
        draws=FEW,
    )

    assert list(found.parts) == ["(all)", "random", "popular"]
    assert {name: (own["accuracy"].value, own["accuracy"].count) for name, own in found.parts.items()} == {
        "(all)": (pytest.approx(2 / 3), 3),
        "random": (0.5, 2),
        "popular": (1.0, 1),
    }
    assert found.parts["random"]["share of yes"].value == 1.0
    assert found.parts["popular"]["precision"].value is None


def test_classes_have_the_number_of_their_examples() -> None:
    found = score([asked("yes", "yes"), asked("no", "yes"), asked("no", "no")], draws=FEW)

    assert {name: own["recall"].count for name, own in found.classes.items()} == {"yes": 2, "no": 1}
    assert found.classes["yes"]["recall"].value == 0.5


@pytest.mark.parametrize(("parts", "totals"), [(MME_PERCEPTION, {"perception": 2000.0}), (MME_COGNITION[1:], {})])
def test_mmes_totals_want_all_of_its_parts(parts: tuple[str, ...], totals: dict[str, float]) -> None:
    outcomes = [asked(answer, answer, digest=part, part=part) for part in parts for answer in ("yes", "no")]

    assert score(outcomes, draws=FEW).totals == totals


def test_the_surest_wrong_answers_are_the_worst() -> None:
    outcomes = [
        asked("yes", "no", sure=0.6),
        asked("yes", "yes", sure=0.99),
        asked("no", "yes", sure=0.9),
        asked("yes", "no", sure=0.7),
    ]
    found = score(outcomes, draws=FEW, num_worst=2).worst

    assert [one.outcome for one in found] == [outcomes[2], outcomes[3]]
    assert [one.confidence for one in found] == [0.9, 0.7]


def test_the_worst_captions_have_the_least_cider() -> None:
    right = ("a small dog runs home", "two red cars on grass")
    outcomes = [
        Outcome(picture="", question="", answer=answer, references=(text,))
        for text, answer in zip(right, (right[0], "a blue sky"), strict=True)
    ]
    found = score(outcomes, draws=FEW).worst

    assert [one.outcome.answer for one in found] == ["a blue sky", right[0]]
    assert found[0].score == 0.0


def test_open_answers_have_parts_of_their_own_figures() -> None:
    outcomes = [
        Outcome(picture="", question="", answer="two", references=("2",), part="count"),
        Outcome(picture="", question="", answer="red", references=("blue",), part="colour"),
    ]
    found = score(outcomes, draws=FEW)

    assert found.task == "open"
    assert found.parts["count"]["normalised"].value == 1.0
    assert found.parts["colour"]["exact"].value == 0.0
    assert [one.outcome for one in found.worst] == [outcomes[1]]


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(UsageError, match="Wanted answered examples to score, got none"):
        score([])


def test_a_part_has_the_figures_that_it_has_alone() -> None:
    outcomes = [
        asked(answer, "yes", digest=f"{index // 2}", part=part)
        for part in ("random", "popular")
        for index, answer in enumerate(("yes", "no", "yes", "yes", "no", "no", "yes", "no"))
    ]
    alone = score([one for one in outcomes if one.part == "popular"], draws=FEW)

    assert score(outcomes, draws=FEW).parts["popular"]["accuracy"] == alone.figures["accuracy"]
    assert score(outcomes, draws=FEW).parts["popular"] == alone.parts["popular"]


def test_choices_that_differ_by_case_alone_are_told_apart() -> None:
    one = Outcome(picture="", question="?", answer="ring", references=("Ring",), choices=("ring", "Ring"))
    found = score([one, replace(one, answer="Ring"), replace(one, answer="RING.")], draws=FEW)

    assert found.confusion is not None
    assert found.confusion.counts == ((0, 0), (2, 1)), "in other case, an answer names the first choice"
