"""Labels for the words of a question: what each word refers to in the scene, for a temporary head of the code stage.

From answers alone the decoder learns lookups very slowly. With a label at each word, it learns them within minutes.
"""

from collections.abc import Iterator

from scripts.train_embedded.questions import plural
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES, Scene, Thing

# Kinds of labels that a word can have, and the number of classes of each kind.
CLASSES: dict[str, int] = {
    "shape": len(SHAPES),
    "color": len(COLOR_NAMES),
    "size": len(SIZES),
    "row": 3,
    "column": 3,
    "count": 4,
    "exist": 2,
}
NOT_ASKED = -100
Labels = tuple[int, ...]  # one label per kind, or NOT_ASKED
_PLURALS = {plural(shape): shape for shape in SHAPES}


def focus_words(text: str, scene: Scene) -> Iterator[tuple[int, Labels]]:
    """Yields (end of the word in `text`, label of each kind or NOT_ASKED) for each word naming a shape or colour."""
    words = text.rstrip("?.").split()
    end = -1
    for index, word in enumerate(words):
        end += 1 + len(word)
        before = words[index - 1] if index else ""
        after = words[index + 1] if index + 1 < len(words) else ""
        if word in _PLURALS:
            yield end, count_labels(sum(thing.shape == _PLURALS[word] for thing in scene))
        elif word in SHAPES and before in COLOR_NAMES:
            yield end, exist_labels(any((thing.shape, thing.color) == (word, before) for thing in scene))
        elif word in SHAPES:
            yield from _found(end, [thing for thing in scene if thing.shape == word])
        elif word in COLOR_NAMES and after == "objects":
            yield end, count_labels(sum(thing.color == word for thing in scene))
        elif word in COLOR_NAMES and after == "object":
            yield from _found(end, [thing for thing in scene if thing.color == word])


def _found(end: int, things: list[Thing]) -> Iterator[tuple[int, Labels]]:
    if len(things) == 1:
        yield end, thing_labels(things[0])


def thing_labels(thing: Thing) -> Labels:
    return _labels(
        shape=SHAPES.index(thing.shape),
        color=COLOR_NAMES.index(thing.color),
        size=SIZES.index(thing.size),
        row=thing.row,
        column=thing.column,
    )


def count_labels(number: int) -> Labels:
    return _labels(count=number)


def exist_labels(exists: bool) -> Labels:
    return _labels(exist=int(exists))


def _labels(**known: int) -> Labels:
    return tuple(known.get(kind, NOT_ASKED) for kind in CLASSES)
