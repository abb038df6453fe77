"""Open answers are normalised and scored as described on VQA's evaluation page.

BLEU, ROUGE-L and CIDEr-D of captions equal those of the COCO evaluation code (pycocoevalcap 1.2) for the same tokens.
"""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from llama_adapter.app.learning.scores.answers import answer_scores, normalised, vqa_score
from llama_adapter.app.learning.scores.captions import bleu, caption_figures, caption_scores, rouge_l, tokens_of
from llama_adapter.app.learning.scores.outcome import Outcome
from tests.app.learning.scores.outcomes import outcome


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
        ("", ()),
    ],
)
def test_words_are_split_as_in_the_penn_treebank_without_punctuation(text: str, tokens: tuple[str, ...]) -> None:
    assert tokens_of(text) == tokens
