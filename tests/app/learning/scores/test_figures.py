"""Figures of choices, open answers and captions equal those of their authors' programs for the same examples.

Choices: scikit-learn 1.9, and the definitions of POPE and MME. Open answers: VQA's evaluation page. Captions: the COCO
evaluation code (pycocoevalcap 1.2) for the same tokens.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_adapter.app.captioning.decisions.measures import measure
from llama_adapter.app.learning.scores.answers import answer_scores, normalised, vqa_score
from llama_adapter.app.learning.scores.captions import bleu, caption_figures, caption_scores, rouge_l, tokens_of
from llama_adapter.app.learning.scores.choices import (
    accuracy_plus,
    choice_figures,
    class_figures,
    confusion,
    part_figures,
    ranks,
    read_choices,
    roc_auc,
)
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.runtime.errors import UsageError
from tests.app.learning.scores.outcomes import outcome

CLASSES = ("cat", "dog", "fox")
# Labels and weights of classes, drawn once at random, and scikit-learn's figures for them;
# its ROC-AUC is of one class against the others.
EXPECTED = json.loads(Path(__file__).with_name("scikit_learn.json").read_text(encoding="utf-8"))
LABELS = EXPECTED["labels"]
WEIGHTS = np.array(EXPECTED["weights"], dtype=np.float64)
SHARES = WEIGHTS / WEIGHTS.sum(axis=1, keepdims=True)


def animals() -> list[Outcome]:
    return [
        outcome(
            CLASSES[int(SHARES[index].argmax())],
            CLASSES[LABELS[index]],
            picture=f"{index}.png",
            choices=CLASSES,
            probabilities=tuple(map(float, SHARES[index])),
            digest=f"digest {index}",
        )
        for index in range(len(LABELS))
    ]


def asked(*answers: tuple[str, str], digests: str = "") -> list[Outcome]:
    """Yes-or-no outcomes for (answer, right answer); `digests` has one letter per picture."""
    return [
        outcome(answer, right, question=f"question {index}", choices=("yes", "no"), digest=digests[index : index + 1])
        for index, (answer, right) in enumerate(answers)
    ]


def figures_of(outcomes: list[Outcome], compute: Callable[..., dict[Any, float | None]] = choice_figures) -> Any:
    """The figures of all these outcomes."""
    return compute(read_choices(outcomes), np.arange(len(outcomes)))


def test_figures_are_those_of_scikit_learn() -> None:
    found = figures_of(animals())

    assert {name: found[name] for name in EXPECTED["figures"]} == pytest.approx(EXPECTED["figures"])
    assert found["ECE"] == pytest.approx(measure(SHARES, np.array(LABELS)).ece)
    of_classes = figures_of(animals(), class_figures)
    for name, shares in EXPECTED["classes"].items():
        assert [of_classes[one, name] for one in CLASSES] == pytest.approx(shares)
    counted = confusion(read_choices(animals()))
    assert counted.columns == CLASSES
    assert counted.counts == ((9, 1, 1), (2, 3, 2), (0, 1, 5)), "right answers in rows"


def test_an_answer_that_names_no_choice_is_wrong_and_has_a_column() -> None:
    counted = confusion(read_choices(asked(("perhaps", "no"), ("yes", "yes"))))

    assert counted.columns == ("yes", "no", "(other)")
    assert counted.counts == ((1, 0, 0), (0, 0, 1))
    assert figures_of(asked(("perhaps", "no"), ("yes", "yes")))["accuracy"] == 0.5


def test_each_of_several_right_choices_is_right() -> None:
    given = [outcome(answer, "cat", "dog", choices=CLASSES) for answer in ("dog", "fox")]

    assert confusion(read_choices(given)).counts == ((0, 0, 1), (0, 1, 0), (0, 0, 0))


def test_roc_auc_counts_ties_half() -> None:
    is_positive = np.array([0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 0], dtype=bool)

    scores = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8.0])
    assert roc_auc(ranks(scores), is_positive) == pytest.approx(0.7285714285714286)
    assert roc_auc(ranks(np.ones(12)), is_positive) == 0.5
    assert roc_auc(ranks(scores[:3]), np.ones(3, dtype=bool)) is None
    assert roc_auc(ranks(scores[:3]), np.zeros(3, dtype=bool)) is None


def test_choices_in_another_order_are_the_same_classes() -> None:
    turned = [
        one if index % 2 else replace(one, choices=CLASSES[::-1], probabilities=(one.probabilities or ())[::-1])
        for index, one in enumerate(animals())
    ]

    expected = figures_of(animals())
    found = figures_of(turned)
    del expected["ECE"], found["ECE"]  # for equally likely choices it depends on their order
    assert found == pytest.approx(expected)


def test_examples_with_choices_of_their_own_have_accuracy_and_ece_alone() -> None:
    given = (("red", "red", ("red", "blue"), (0.8, 0.2)), ("1", "3", ("1", "2", "3"), (0.6, 0.3, 0.1)))
    outcomes = [outcome(one, right, choices=own, probabilities=shares) for one, right, own, shares in given]

    assert figures_of(outcomes) == pytest.approx({"accuracy": 0.5, "ECE": (0.2 + 0.6) / 2})
    assert confusion(read_choices(outcomes)) is None


def test_popes_row_is_computed_for_yes() -> None:
    # 3 right yes, 1 wrong yes, 2 missed yes, 3 right no, 1 neither
    given = [("yes", "yes")] * 3 + [("Yes, there is.", "no")] + [("no", "yes")] * 2 + [("No", "no")] * 3 + [("?", "no")]
    shares = {"accuracy": 0.6, "precision": 3 / 4, "recall": 3 / 5, "F1": 2 / 3, "share of yes": 0.4}
    assert figures_of(asked(*given), part_figures) == pytest.approx(shares)


def test_accuracy_plus_wants_every_question_of_a_picture_right() -> None:
    given = [("yes", "yes"), ("no", "no"), ("yes", "yes"), ("yes", "no"), ("no", "yes"), ("yes", "no")]
    outcomes = asked(*given, digests="aabbcc")
    found = figures_of(outcomes, part_figures)

    assert found["accuracy+"] == pytest.approx(1 / 3)
    assert found["MME score"] == pytest.approx(50 + 100 / 3)
    assert accuracy_plus(read_choices(outcomes), np.array([0, 1, 0, 1, 2, 3])) == pytest.approx(
        2 / 3
    )  # picture 0 is listed twice


@pytest.mark.parametrize(
    ("choices", "answers"),
    [
        (("yes", "no"), {"Yes": 0, "no.": 1, "Yes, there is.": 0, "nothing": None, "": None, "No dog": 1}),
        (("red", "red ring"), {"Red ring, I think": 1, "red, I think": 0}),  # of two, the longer one is meant
        (("?", "!"), {"": None, "?": 0, "!": 1, "...": None}),
    ],
)
def test_an_answer_names_the_choice_that_it_is_or_begins_with(
    choices: tuple[str, str], answers: dict[str, int | None]
) -> None:
    one = outcome("", choices[0], choices=choices)
    assert {answer: one.chosen(answer) for answer in answers} == answers


def test_a_right_answer_that_is_no_choice_is_named() -> None:
    with pytest.raises(UsageError, match=r"Wanted one of yes, no as the right answer for “question 0”, got `maybe`"):
        read_choices(asked(("yes", "maybe")))


def test_a_class_without_examples_and_answers_has_no_figures() -> None:
    outcomes = [outcome("cat", "cat", choices=CLASSES)]
    found = figures_of(outcomes, class_figures)

    assert [found["dog", name] for name in ("precision", "recall", "F1")] == [None] * 3
    assert figures_of(outcomes) == {"accuracy": 1.0, "balanced accuracy": 1.0, "macro F1": 1.0}


def test_one_picture_in_two_parts_is_two_sets_of_questions() -> None:
    outcomes = [
        replace(one, part=part)
        for part, mark in (("count", "yes"), ("color", "no"))
        for one in asked(("yes", mark), ("yes", mark), digests="aa")
    ]
    assert figures_of(outcomes, accuracy_plus) == 0.5


@pytest.mark.parametrize(
    ("text", "form"), json.loads(Path(__file__).with_name("normalised.json").read_text(encoding="utf-8")).items()
)
def test_answers_are_normalised_as_vqa_describes(text: str, form: str) -> None:
    assert normalised(text) == form


@pytest.mark.parametrize("num_same", range(11))
def test_vqas_score_is_the_mean_over_all_nines_of_ten_people(num_same: int) -> None:
    references = ["two"] * num_same + ["other"] * (10 - num_same)
    nines = [min(1.0, nine.count("two") / 3) for nine in combinations(references, 9)]

    assert vqa_score("2", references) == pytest.approx(sum(nines) / 10)


def test_exact_and_normalised_take_any_reference() -> None:
    outcomes = [outcome("The dog", "cat", "dog"), outcome("cat ", "cat", "dog"), outcome("bird", "cat")]
    found = answer_scores(outcomes)

    assert {name: list(scores) for name, scores in found.items()} == {"exact": [0, 1, 0], "normalised": [1, 1, 0]}


def test_vqas_score_is_there_if_all_have_ten_references() -> None:
    ten = outcome("red", *["red"] * 2, *["blue"] * 8)

    found = answer_scores([ten, outcome("blue", *["red"] * 2, *["blue"] * 8)])
    assert found["VQA"] == pytest.approx([0.6, 1.0])
    assert "VQA" not in answer_scores([ten, outcome("red", "red")])


# Captions, and their figures by COCO's code.
COCO = json.loads(Path(__file__).with_name("coco.json").read_text(encoding="utf-8"))
CAPTIONS = [one["caption"] for one in COCO["captions"]]
REFERENCES = [one["references"] for one in COCO["captions"]]


def captioned() -> list[Outcome]:
    pairs = zip(CAPTIONS, REFERENCES, strict=True)
    return [outcome(text, *right, picture=f"{index}.png") for index, (text, right) in enumerate(pairs)]


def test_figures_are_those_of_cocos_code() -> None:
    found = caption_scores(captioned())

    # Their BLEU adds small constants in each division.
    assert caption_figures(found, np.arange(4)) == pytest.approx(COCO["figures"], rel=1e-8)
    assert found.rouge_N == pytest.approx([one["ROUGE-L"] for one in COCO["captions"]])
    assert found.cider_N == pytest.approx([one["CIDEr-D"] for one in COCO["captions"]])


def test_bleu_clips_as_in_the_papers_example() -> None:
    counts = caption_scores([outcome("the " * 7, "The cat is on the mat.", "There is a cat on the mat.")])

    assert bleu(counts, np.array([0]), order=1) == pytest.approx(2 / 7)
    assert bleu(counts, np.array([0]), order=2) == 0.0
    # A short caption pays the brevity penalty.
    counts = caption_scores([outcome("a dog", "a dog runs fast")])
    assert bleu(counts, np.array([0]), order=1) == pytest.approx(np.exp(1 - 4 / 2))


def test_rouge_l_of_the_papers_example() -> None:
    # Lin (2004), section 3.1: S1 police killed the gunman, S2 police kill the gunman: LCS 3 of 4 words.
    right = [tokens_of("police killed the gunman")]
    assert rouge_l(tokens_of("police kill the gunman"), right) == 0.75
    assert rouge_l(tokens_of("the gunman kill police"), right) == 0.5


def test_an_empty_caption_has_zero_everywhere() -> None:
    outcomes = [*captioned(), outcome(" .", "a dog")]
    found = caption_scores(outcomes)

    assert (found.rouge_N[-1], found.cider_N[-1]) == (0.0, 0.0)
    assert bleu(found, np.array([4]), order=1) == 0.0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("A dog's ball, isn't it?", ("a", "dog", "'s", "ball", "is", "n't", "it")),
        ("Two T-shirts - “red”; 3.5 m!", ("two", "t-shirts", "red", "3.5", "m")),
        ("They’re 50/50...", ("they", "'re", "50/50")),
        (
            "cannot, gonna 1,000,red1 3:30pm o'clock",
            ("can", "not", "gon", "na", "1,000", "red1", "3:30", "pm", "o'clock"),
        ),
        ("A cafe\u0301, ein Mädchen", ("a", "café", "ein", "mädchen")),
        ("लाल बिल्ली, แมว।", ("लाल", "बिल्ली", "แมว")),
        ("2只猫，ねこ。", ("2", "只", "猫", "ね", "こ")),
        ("", ()),
    ],
)
def test_words_are_split_as_in_the_penn_treebank_without_punctuation(text: str, tokens: tuple[str, ...]) -> None:
    assert tokens_of(text) == tokens
