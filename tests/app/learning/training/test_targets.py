"""What an encoder learns from labelled pictures: answers to questions that recur, and words."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from llama_adapter.app.learning.training.asking import TokenRow, TrainExample
from llama_adapter.app.learning.training.targets import targets_of
from tests.app.learning.labelled import tables

KINDS, COLOURS = ("disc", "ring", "bar"), ("red", "blue")


def asked(picture: int | None, prompt: str, answer: str, **fields: Any) -> TrainExample:
    source = None if picture is None else f"{picture}.png"
    digest = "" if picture is None else str(picture)
    example = tables.example(answer, source=source, digest=digest, **fields)
    return TrainExample(example=example, prompt=prompt, rows=(TokenRow((1, 2, 3), 2),))


def classes(**counts: int) -> list[TrainExample]:
    names = [name for name, count in counts.items() for _ in range(count)]
    return [asked(at, "Which?", name, task="choice", choices=KINDS) for at, name in enumerate(names)]


def each(prompt: str, *answers: str, start: int = 0, **fields: Any) -> list[TrainExample]:
    return [asked(start + at, prompt, answer, **fields) for at, answer in enumerate(answers)]


QUESTIONS = [*each("Colour?", *4 * COLOURS), *each("How many?", *4 * ["2"], *4 * ["3"])]
CAPTIONS = each("Describe.", *4 * ["Two red rings."], *4 * ["a red disc"], task="caption")
CHINESE = each("描述", *4 * ["红色圆"], *4 * ["红色方"], task="caption")
OPEN = [asked(at, f"Question {at}?", "yes") for at in range(8)]
COPIES = [asked(0, "Which?", "disc", task="choice", choices=KINDS), *classes(disc=1, ring=1)]
WHICH = (("Which?", KINDS),)
COUNTS = (("Colour?", ("blue", "red")), ("How many?", ("2", "3")))


@pytest.mark.parametrize(
    ("examples", "groups", "labels"),
    [
        (classes(ring=2, disc=2), WHICH, [[1], [1], [0], [0]]),  # in the order of the choices
        ([*classes(ring=9, disc=1), asked(None, "Why?", "so")], (*WHICH,), [*9 * [[1]], [0]]),  # a text too
        (COPIES, WHICH, [[0], [1]]),
        (QUESTIONS, COUNTS, [[1, 0], [0, 0], [1, 0], [0, 0], [1, 1], [0, 1], [1, 1], [0, 1]]),
        (each("How many?", *4 * ["2"], "3", "4", "5", "6"), (("How many?", ("", "2")),), [*4 * [[1]], *4 * [[0]]]),
        ([*QUESTIONS, asked(0, "Why?", "none")], COUNTS, None),  # little is left out
        ([*QUESTIONS, asked(8, "Why?", "none")], COUNTS, [*8 * [None], [-100, -100]]),
        ([*QUESTIONS, asked(None, "Colour?", "red")], COUNTS, None),  # not of a picture
        (CAPTIONS, tuple(("Describe.", ("", word)) for word in ("two", "rings", "a", "disc")), None),  # all are red
        (CHINESE, (("描述", ("", "圆")), ("描述", ("", "方"))), None),
        (each("Name?", *map(str, range(8))), None, None),
        (classes(ring=8), None, None),
        ([*QUESTIONS, *OPEN], None, None),
        (OPEN, None, None),
        ([*CAPTIONS[:1], *CAPTIONS[4:5]] * 4, None, None),  # copies of two pictures
        ([], None, None),
    ],
    ids=map(str, range(16)),
)
def test_what_recurs_is_learned(examples: list[TrainExample], groups: Any, labels: Any) -> None:
    found = targets_of(examples)
    if groups is None or found is None:
        assert found is groups
        return
    assert [(group.prompt, group.answers) for group in found.groups] == list(groups)  # ranks need one order
    assert found.are_classes == (groups is WHICH)
    shown = found.labels().tolist()
    assert [one if wanted else None for one, wanted in zip(shown, labels or shown, strict=True)] == (labels or shown)


def test_the_loss_is_the_mean_of_the_groups_of_a_picture() -> None:
    found = targets_of([*QUESTIONS, asked(8, "Why?", "none")])
    random = torch.Generator().manual_seed(0)
    logits_BK, wanted_BK = torch.randn(2, 9, 4, generator=random)
    label_BG = found.labels()
    parts = [
        F.cross_entropy(logits_BK[:8, at : at + 2], label_BG[:8, at // 2], label_smoothing=0.1, reduction="none")
        for at in (0, 2)
    ]
    torch.testing.assert_close(
        found.losses(logits_BK, label_BG), torch.cat([(parts[0] + parts[1]) / 2, torch.zeros(1)])
    )
    own_BK = [one_BK.requires_grad_() for one_BK in (wanted_BK.clone(), logits_BK.clone())]
    same, other = (torch.autograd.grad(found.losses(one_BK, wanted_BK).sum(), one_BK)[0] for one_BK in own_BK)
    assert same.abs().max() < 1e-6  # equal logits are the minimum
    assert other.abs().max() > 0.01


def test_answers_are_right_by_the_likeliest_of_their_own_question() -> None:
    found = targets_of([*QUESTIONS, *CAPTIONS])
    prompts = [group.prompt for group in found.groups if group.answers[0]]
    assert prompts == ["Colour?", "How many?"]
    logits_K = torch.zeros(2 * len(found.groups))
    logits_K[1], logits_K[2] = 1.0, 1.0  # red, 2
    held = [asked(0, "Colour?", "red"), asked(0, "How many?", "3"), asked(0, "Describe.", "Two red rings.")]
    assert found.are_right(logits_K.expand(3, -1), held) == [True, False]
