"""What a small encoder learns about pictures, before the decoder learns to say it.

These are the answers to questions with few different answers, such as classes, and the words of captions and of other
answers. Each of these questions, and each word, is a group of logits with a cross-entropy of its own.
"""

# B pictures, N pictures of all, G groups, K logits of all groups

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.app.captioning.tasks.prompts import Prompt
from llama_adapter.app.learning.scores.captions import tokens_of
from llama_adapter.app.learning.training.asking import TrainExample

_MOST_CLASSES, _MOST_GROUPS = 1000, 100
_FEWEST: Final = 4  # pictures of an answer, on average; pictures with a word, and without it
_LEAST_SHARE: Final = 0.75  # of the examples with pictures: those whose question has a group
_SMOOTHING: Final = 0.1
_NONE: Final = -100  # no label


class Group(NamedTuple):
    """A question and its answers; or a question and ("", word): whether the answer has the word."""

    prompt: Prompt
    answers: tuple[str, ...]

    def label(self, examples: Iterable[TrainExample]) -> int:
        """Which answer a picture has by its examples; `_NONE` if they do not tell."""
        own = [one.example.answers for one in examples if one.prompt == self.prompt]
        if own and not self.answers[0]:
            return int(any(self.answers[1] in _words(texts) for texts in own))
        return next((self.answers.index(one[0]) for one in own if one[0] in self.answers), _NONE)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Targets:
    """What the encoder learns."""

    pictures: tuple[tuple[TrainExample, ...], ...]  # the examples of each picture
    groups: tuple[Group, ...]
    are_classes: bool  # whether all examples are pictures that one question sorts into classes

    def labels(self) -> Tensor:
        """The answer of each picture in each group, or `_NONE`: int64 (N, G)."""
        return torch.tensor([[group.label(own) for group in self.groups] for own in self.pictures])

    def losses(self, logits_BK: Tensor, wanted: Tensor) -> Tensor:
        """The mean loss of each picture's groups, (B,), for labels (B, G) or the probabilities of logits (B, K)."""
        if wanted.is_floating_point():
            parts, smoothing = [one.softmax(1) for one in self._split(wanted)], 0.0
        else:
            parts, smoothing = list(wanted.unbind(1)), _SMOOTHING
        pairs = zip(self._split(logits_BK), parts, strict=True)
        losses = [F.cross_entropy(one, part, label_smoothing=smoothing, reduction="none") for one, part in pairs]
        return torch.stack(losses).mean(0)

    def are_right(self, logits_BK: Tensor, examples: Sequence[TrainExample]) -> list[bool]:
        """Whether the likeliest answer is right, for each of the examples with a group of answers."""
        pairs = zip(self.groups, self._split(logits_BK), strict=True)
        likeliest = {group: one_BK.argmax(1).tolist() for group, one_BK in pairs if group.answers[0]}
        said = {group.prompt: [group.answers[at] for at in found] for group, found in likeliest.items()}
        return [said[one.prompt][at] in one.example.answers for at, one in enumerate(examples) if one.prompt in said]

    def shares(self, logits_BK: Tensor, examples: Sequence[TrainExample]) -> list[Mapping[str, float]]:
        """The probability of each answer to the question of each of B examples.

        It is empty if the question has no group of answers, or if a logit is not finite.
        """
        found: list[Mapping[str, float]] = [{}] * len(examples)
        for group, one_BK in zip(self.groups, self._split(logits_BK), strict=True):
            if group.answers[0]:
                for place, (one, share_K) in enumerate(zip(examples, one_BK.softmax(1).tolist(), strict=True)):
                    if one.has_picture and one.prompt == group.prompt and math.isfinite(sum(share_K)):
                        found[place] = dict(zip(group.answers, share_K, strict=True))
        return found

    def _split(self, logits_BK: Tensor) -> tuple[Tensor, ...]:
        return torch.split(logits_BK, [len(group.answers) for group in self.groups], dim=1)


def targets_of(examples: Sequence[TrainExample]) -> Targets | None:
    """What an encoder can learn from the training examples; None if that is about too few of them."""
    pictures, asked = defaultdict[str, list[TrainExample]](list), defaultdict[Prompt, list[TrainExample]](list)
    for one in (seen := [one for one in examples if one.has_picture]):
        pictures[one.example.digest].append(one)
        asked[one.prompt].append(one)
    counted = Counter[Group]()
    for prompt, own in asked.items():
        counted.update({Group(prompt, answers): count for answers, count in _answers(own).items()})
    groups = tuple(group for group, _ in counted.most_common(_MOST_GROUPS))
    if not groups or sum(len(asked[one]) for one in {group.prompt for group in groups}) < _LEAST_SHARE * len(seen):
        return None
    are_classes = len(groups) == len(asked) == 1 and groups[0].answers[0] != "" and len(seen) == len(examples)
    return Targets(pictures=tuple(map(tuple, pictures.values())), groups=groups, are_classes=are_classes)


def _answers(examples: Sequence[TrainExample]) -> dict[tuple[str, ...], int]:
    """The answers of each group of a question, with the number of pictures that it tells something about."""
    found, choices = {one.example.answers[0] for one in examples}, examples[0].example.choices
    num_pictures = len({one.example.digest for one in examples})
    are_choices = choices is not None and all(one.example.choices == choices for one in examples)
    answers = tuple(choices or ()) if are_choices else tuple(sorted(found))
    is_few = are_choices or _FEWEST * len(answers) <= num_pictures
    if len(found) > 1 and is_few and len(answers) <= _MOST_CLASSES and examples[0].example.task != "caption":
        return {answers: num_pictures}
    said = dict.fromkeys((one.example.digest, word) for one in examples for word in _words(one.example.answers))
    counts = Counter(word for _, word in said)
    return {("", word): count for word, count in counts.items() if _FEWEST <= count <= num_pictures - _FEWEST}


@lru_cache(maxsize=1000)
def _words(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The words of the texts, each once, in their order: it is the same in all processes."""
    return tuple(dict.fromkeys(word for text in texts for word in tokens_of(text)))
