"""Metrics of open answers: exact match, match after normalisation, and VQAv2's score.

They follow Antol et al., "VQA: Visual Question Answering" (2015), and the page "Evaluation" of visualqa.org.
`normalised` takes the steps of that page in order.
"""

import re
import string
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from llama_adapter.app.learning.scores.outcome import Floats, Outcome

NUM_VQA_ANSWERS: Final = 10  # number of people who answered each question
_ENOUGH: Final = 3  # an answer that this many people gave is fully right

_NUMBERS: Final = {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
} | {"none": "0"}
_ARTICLES: Final = frozenset(("a", "an", "the"))
_NEGATED: Final = (
    *("ai", "are", "could", "did", "does", "do", "had", "has", "have"),
    *("is", "might", "must", "need", "should", "was", "were", "wo", "would"),
)
# Contractions that are other words without the apostrophe (well, were, ill, shed, its) are not in the list.
_CONTRACTED: Final = (
    *("can't", "couldn't've", "he's", "how's", "i'm", "i've", "it'll", "let's", "ma'am", "o'clock", "she's", "that's"),
    *("there's", "they'd", "they'll", "they're", "they've", "we've", "what're", "what's", "where's", "who'd", "who's"),
    *("y'all", "you'd", "you'll", "you're", "you've", *(f"{verb}n't" for verb in _NEGATED)),
)
_CONTRACTIONS: Final = {whole.replace("'", ""): whole for whole in _CONTRACTED}
_APOSTROPHES: Final = dict.fromkeys(map(ord, "‘’ʼ`´"), "'")


@lru_cache(maxsize=2**16)  # VQAv2 has ten answers to each question, and most are equal
def normalised(text: str) -> str:
    """An answer in the form in which VQA's evaluation compares answers.

    The text becomes lower case. Periods are removed, except in decimals, and commas between digits too. Other
    punctuation becomes a space, except apostrophes and colons. Number words become digits, articles are removed, and
    contractions get a missing apostrophe. If nothing would be left, articles and punctuation stay.
    """
    lowered = unicodedata.normalize("NFC", text.lower()).translate(_APOSTROPHES)
    text = re.sub(r"\.(?!\d)", "", lowered)
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = "".join(" " if _is_punctuation(letter) else letter for letter in text)
    words = [_NUMBERS.get(word, word) for word in text.split()]
    kept = [word for word in words if word not in _ARTICLES] or words or lowered.split()
    return " ".join(_CONTRACTIONS.get(word, word) for word in kept)


def vqa_score(answer: str, references: Sequence[str]) -> float:
    """VQA's accuracy of an answer, 0 to 1: min(1, people who gave it / 3), averaged over leaving each person out."""
    own = normalised(answer)
    agrees = [normalised(reference) == own for reference in references]
    others = (sum(agrees) - left_out for left_out in agrees)
    return sum(min(1.0, count / _ENOUGH) for count in others) / len(references)


def answer_scores(outcomes: Sequence[Outcome]) -> dict[str, Floats]:
    """Name of a metric -> the score of each outcome, (N,), 0 to 1. Has VQA's score if all have ten references."""
    found = {
        "exact": [float(one.answer.strip() in {text.strip() for text in one.references}) for one in outcomes],
        "normalised": [
            float(normalised(one.answer) in {normalised(text) for text in one.references}) for one in outcomes
        ],
    }
    if outcomes and all(len(one.references) == NUM_VQA_ANSWERS for one in outcomes):
        found["VQA"] = [vqa_score(one.answer, one.references) for one in outcomes]
    return {name: np.array(values, dtype=np.float64) for name, values in found.items()}


def _is_punctuation(letter: str) -> bool:
    if letter in "':.":  # the remaining periods are in decimals
        return False
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")
