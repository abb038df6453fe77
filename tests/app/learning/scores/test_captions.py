"""BLEU, ROUGE-L and CIDEr-D equal those of the COCO evaluation code (pycocoevalcap 1.2) for the same tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_adapter.app.learning.scores.captions import (
    bleu,
    bleu_counts,
    caption_figures,
    caption_scores,
    cider_d,
    rouge_l,
    tokens_of,
)
from llama_adapter.app.learning.scores.outcome import Outcome
from tests.app.learning.scores.outcomes import outcome

REFERENCES = (
    (
        "a man rides a brown horse on the beach",
        "a person is riding a horse by the sea",
        "man on horseback at the shore",
    ),
    ("two dogs play in the snow", "a pair of dogs running through snow"),
    (
        "a red bus parked on a city street",
        "the bus is red",
        "a double decker bus stands at the side of the road",
        "red bus",
    ),
    ("a plate of food with a fork and a knife",),
)
CAPTIONS = (
    "a man is riding a horse on the beach",
    "a dog in the snow in the snow in the snow",
    "a red double decker bus on the street",
    "a cat sits on a chair",
)


def captioned(order: tuple[int, ...] = (0, 1, 2, 3)) -> list[Outcome]:
    return [outcome(CAPTIONS[index], *REFERENCES[index], picture=f"{index}.png") for index in order]


def all_figures(outcomes: list[Outcome]) -> dict[str, float | None]:
    return caption_figures(caption_scores(outcomes), np.arange(len(outcomes)))


def test_figures_are_those_of_cocos_code() -> None:
    assert all_figures(captioned()) == pytest.approx(
        {
            "BLEU-1": 0.6764705881955018,
            "BLEU-2": 0.520180963955067,
            "BLEU-3": 0.3967305133329947,
            "BLEU-4": 0.2744881068392029,
            "ROUGE-L": 0.5480834501592826,
            "CIDEr-D": 1.180006621378039,
        },
        rel=1e-8,  # their BLEU adds small constants in each division
    )


def test_scores_of_single_captions_are_those_of_cocos_code() -> None:
    found = caption_scores(captioned())

    assert found.rouge_N == pytest.approx([0.7777777777777778, 0.3727087576374745, 0.8026315789473684, 0.239215686])
    assert found.cider_N == pytest.approx([2.6694525597389376, 0.5463279365996936, 1.504245989173525, 0.0])


def test_bleu_clips_as_in_the_papers_example() -> None:
    references = [[tokens_of("The cat is on the mat."), tokens_of("There is a cat on the mat.")]]
    counts = bleu_counts([tokens_of("the the the the the the the")], references)

    assert bleu(counts, np.array([0]), order=1) == pytest.approx(2 / 7)
    assert bleu(counts, np.array([0]), order=2) == 0.0


def test_a_short_caption_pays_bleus_brevity_penalty() -> None:
    counts = bleu_counts([("a", "dog")], [[("a", "dog", "runs", "fast")]])

    assert bleu(counts, np.array([0]), order=1) == pytest.approx(np.exp(1 - 4 / 2))


def test_rouge_l_of_the_papers_example() -> None:
    # Lin (2004), section 3.1: S1 police killed the gunman, S2 police kill the gunman: LCS 3 of 4 words.
    right = [tokens_of("police killed the gunman")]
    assert rouge_l(tokens_of("police kill the gunman"), right) == 0.75
    assert rouge_l(tokens_of("the gunman kill police"), right) == 0.5


def test_a_caption_equal_to_its_only_reference_has_every_highest_score() -> None:
    outcomes = [outcome(text, text) for text in ("a small dog runs home", "two red cars on grass")]

    assert all_figures(outcomes) == pytest.approx(
        {"BLEU-1": 1, "BLEU-2": 1, "BLEU-3": 1, "BLEU-4": 1, "ROUGE-L": 1, "CIDEr-D": 10}
    )


def test_an_empty_caption_has_zero_everywhere() -> None:
    outcomes = [*captioned(), outcome(" .", "a dog")]
    found = caption_scores(outcomes)

    assert (found.rouge_N[-1], found.cider_N[-1]) == (0.0, 0.0)
    assert bleu(found.bleu, np.array([4]), order=1) == 0.0


@settings(max_examples=20)
@given(st.permutations((0, 1, 2, 3)))
def test_the_order_of_captions_changes_nothing(order: list[int]) -> None:
    assert all_figures(captioned(tuple(order))) == pytest.approx(all_figures(captioned()))


def test_cider_d_of_a_caption_does_not_depend_on_other_captions() -> None:
    references = [[tokens_of(text) for text in right] for right in REFERENCES]
    own = [tokens_of(text) for text in CAPTIONS]

    assert cider_d([own[0], *own[:0:-1]], references)[0] == cider_d(own, references)[0]


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
