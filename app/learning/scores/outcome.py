"""Answered examples: the question, the model's answer and the right answers. Computes no metrics."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_excerpt, shown_name

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Task = Literal["choices", "open", "captions"]

YES_NO: Final = frozenset(("yes", "no"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One answered example. Raises UsageError without references, or if probabilities do not match the choices."""

    picture: str  # name of the picture; empty without a picture
    question: str
    answer: str
    references: tuple[str, ...]  # right answers, at least one
    choices: tuple[str, ...] | None = None  # the fixed set of answers, if there is one
    probabilities: tuple[float, ...] | None = None  # in the order of `choices`, 0 to 1
    part: str = ""  # a part of the data that is reported separately
    digest: str = ""  # of the picture; outcomes of one picture are drawn together; empty without a picture

    def __post_init__(self) -> None:
        if not self.references:
            raise UsageError(f"Wanted at least one right answer for {self._shown()}, got none")
        if self.probabilities is None:
            return
        num_choices = len(self.choices or ())
        if len(self.probabilities) != num_choices:
            raise UsageError(
                f"Wanted {num_choices} probabilities for {self._shown()}, one for each choice, "
                f"got {len(self.probabilities)}"
            )
        if not all(0.0 <= one <= 1.0 for one in self.probabilities):
            raise UsageError(f"Wanted probabilities from 0 to 1 for {self._shown()}, got {self.probabilities}")

    def chosen(self, text: str) -> int | None:
        """The index of the choice that a text names; None if it names no choice.

        This is the choice that the text equals, otherwise the longest choice with which the text begins, compared by
        whole words: `Yes, a dog.` names `yes`. Case is ignored, and so are white space and punctuation at both ends.
        """
        if text in (self.choices or ()):
            return (self.choices or ()).index(text)
        folded = _folded(text)
        named = [(name, index) for index, choice in enumerate(self.choices or ()) if (name := _folded(choice))]
        equal = [index for name, index in named if name == folded]
        if equal:
            return equal[0]
        begun = [(len(name), -index) for name, index in named if _begins(folded, name)]
        return -max(begun)[1] if begun else None

    @property
    def example_key(self) -> tuple[object, ...]:
        """A key that is equal for outcomes of the same example: picture, question, part and right answers."""
        return self.digest or self.picture, self.question, self.part, self.references

    @property
    def label(self) -> int:
        """The index of the right choice. Raises UsageError if the first reference is not a choice."""
        if self.references[0] in (self.choices or ()):
            return (self.choices or ()).index(self.references[0])
        folded = _folded(self.references[0])
        for index, choice in enumerate(self.choices or ()):
            if _folded(choice) == folded:
                return index
        raise UsageError(
            f"Wanted one of {', '.join(self.choices or ())} as the right answer for {self._shown()}, "
            f"got `{shown_excerpt(self.references[0])}`"
        )

    def _shown(self) -> str:
        return f"`{shown_name(self.picture)}`" if self.picture else f"“{shown_excerpt(self.question)}”"


def picture_groups(outcomes: Sequence[Outcome]) -> Ints:
    """The number of each outcome's picture, (N,), from 0 in order of appearance; one of its own without a picture."""
    numbers: dict[object, int] = {}
    keys = [one.digest or (one.picture or index) for index, one in enumerate(outcomes)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def task_of(outcomes: Sequence[Outcome]) -> Task:
    """The task for scoring: choices if all outcomes have them, captions if references are long, otherwise open answers.

    Long references have four or more words on average. Raises UsageError if there are no outcomes, or only some have
    choices.
    """
    if not outcomes:
        raise UsageError("Wanted answered examples to score, got none")
    num_choices = sum(one.choices is not None for one in outcomes)
    if num_choices == len(outcomes):
        return "choices"
    if num_choices:
        raise UsageError(
            f"Wanted choices for all examples or for none, got them for {num_choices} of {len(outcomes)}",
            hint="score the two kinds as two sets",
        )
    return "captions" if are_captions([text for one in outcomes for text in one.references]) else "open"


def are_captions(references: Sequence[str]) -> bool:
    """Whether right answers without choices are captions: four or more words on average."""
    return sum(len(text.split()) for text in references) >= 4 * len(references)


@lru_cache(maxsize=2**16)  # the same choices occur in every example
def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split()).strip(" .,:;!?\"'()[]")


def _begins(text: str, name: str) -> bool:
    return text.startswith(name) and not text[len(name) : len(name) + 1].isalnum()
