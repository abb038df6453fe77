"""What the words of a question should find in the scene."""

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
    """By word: the labels that are asked for."""
    return {
        text[:end].split()[-1]: {kind: label for kind, label in zip(CLASSES, labels, strict=True) if label != NOT_ASKED}
        for end, labels in focus_words(text, SCENE)
    }


def test_a_shape_finds_its_only_object() -> None:
    star = {
        "shape": SHAPES.index("star"),
        "color": COLOR_NAMES.index("red"),
        "size": SIZES.index("small"),
        "row": 0,
        "column": 0,
    }
    assert _found("What color is the star?") == {"star": star}
    assert _found("Is the star above the ring?")["star"] == star


def test_a_colour_finds_its_only_object_and_nothing_when_there_are_two() -> None:
    assert _found("What shape is the red object?")["red"]["shape"] == SHAPES.index("star")
    assert _found("What shape is the blue object?") == {}


def test_counting_words_find_a_number() -> None:
    assert _found("How many crosses are there?") == {"crosses": {"count": 1}}
    assert _found("How many blue objects are there?") == {"blue": {"count": 2}}


def test_a_kind_finds_whether_it_is_there() -> None:
    assert _found("Is there a red star?") == {"star": {"exist": 1}}
    assert _found("Is there a blue star?") == {"star": {"exist": 0}}
