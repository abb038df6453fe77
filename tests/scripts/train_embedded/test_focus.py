"""What the words of a question should find in the scene."""

import pytest

from scripts.train_embedded.focus import CLASSES, NOT_ASKED, focus_words
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES, scene_from_words

SCENE = scene_from_words(
    [
        ("small", "red", "star", "top left"),
        ("large", "blue", "ring", "bottom left"),
        ("large", "blue", "cross", "right"),
    ]
)


def _found(text: str) -> dict[str, dict[str, int]]:
    """The labels of each word."""
    return {
        text[:end].split()[-1]: {kind: label for kind, label in zip(CLASSES, labels, strict=True) if label != NOT_ASKED}
        for end, labels in focus_words(text, SCENE)
    }


STAR = {
    "shape": SHAPES.index("star"),
    "color": COLOR_NAMES.index("red"),
    "size": SIZES.index("small"),
    "row": 0,
    "column": 0,
}


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("What color is the star?", {"star": STAR}),
        ("What shape is the red object?", {"red": STAR}),
        ("What shape is the blue object?", {}),  # there are two blue objects
        ("How many crosses are there?", {"crosses": {"count": 1}}),
        ("How many blue objects are there?", {"blue": {"count": 2}}),
        ("Is there a red star?", {"star": {"exist": 1}}),
        ("Is there a blue star?", {"star": {"exist": 0}}),
    ],
)
def test_words_find_what_they_refer_to(question: str, wanted: dict[str, dict[str, int]]) -> None:
    assert _found(question) == wanted


def test_both_objects_of_a_relation_are_found() -> None:
    found = _found("Is the star above the ring?")
    assert (found["star"], found["ring"]["shape"]) == (STAR, SHAPES.index("ring"))
