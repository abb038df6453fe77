"""Sentences: each task's question and its only right answer, word by word, and what words refer to."""

import numpy as np
import pytest
from syrupy.assertion import SnapshotAssertion

from scripts.train_embedded.questions import CLASSES, NOT_ASKED, TASKS, ask, caption
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES, scene_from_words

STAR = ("small", "red", "star", "top left")
RING = ("large", "blue", "ring", "bottom left")
CROSS = ("large", "orange", "cross", "right")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([STAR], "a small red star at the top left"),
        ([CROSS, STAR], "a small red star to the left of a large orange cross"),
        ([RING, STAR], "a small red star above a large blue ring"),
        ([CROSS, RING, STAR], "a small red star, a large blue ring and a large orange cross"),
    ],
)
def test_captions_read_as_the_world_promises(words: list[tuple[str, ...]], wanted: str) -> None:
    assert caption(scene_from_words(words)) == wanted


def test_questions_have_their_one_right_answer(snapshot: SnapshotAssertion) -> None:
    scene, asked = scene_from_words([STAR, RING, CROSS]), {}
    for task in (task for task in TASKS if task != "caption"):
        rng = np.random.default_rng(0)
        questions = [ask(scene, task, rng) for _ in range(200)]
        asked[task] = sorted({f"{each.text} {each.answer}" for each in questions if each is not None})
    assert asked == snapshot


STAR_LABELS = {
    "shape": SHAPES.index("star"),
    "color": COLOR_NAMES.index("red"),
    "size": SIZES.index("small"),
    "row": 0,
    "column": 0,
}


def test_words_say_what_they_refer_to() -> None:
    scene, rng = scene_from_words([STAR, RING, ("large", "blue", "cross", "right")]), np.random.default_rng(0)
    asked = [ask(scene, task, rng) for task in TASKS for _ in range(200)]
    labels = {
        each.text: {
            each.text[:end].split()[-1]: {kind: at for kind, at in zip(CLASSES, found, strict=True) if at != NOT_ASKED}
            for end, found in each.words
        }
        for each in asked
        if each is not None
    }

    assert labels["What color is the star?"] == labels["What is to the right of the star?"] == {"star": STAR_LABELS}
    assert labels["What shape is the red object?"] == {"red": STAR_LABELS}
    assert labels["How many crosses are there?"] == {"crosses": {"count": 1}}
    assert labels["How many blue objects are there?"] == {"blue": {"count": 2}}
    assert labels["Is there a red star?"] == {"star": {"exist": 1}}
    assert labels["Is there a blue star?"] == {"star": {"exist": 0}}
    both = labels["Is the star above the ring?"]
    assert (both["star"], both["ring"]["shape"]) == (STAR_LABELS, SHAPES.index("ring"))
    assert labels["Generate caption of this image"] == labels["How many objects are there?"] == {}
