"""The sentences: every question that a scene allows, with its only right answer. Pixels and tokens are not known here.

A label at each word says what the word refers to in the scene, for a temporary head of the stages `code` and `wording`.
From answers alone the decoder learns lookups very slowly; with the labels it learns them within minutes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from scripts.train_embedded.world import COLOR_NAMES, POSITIONS, SHAPES, SIZES, Scene, Thing

T = TypeVar("T")

CAPTION_QUESTIONS = ("Generate caption of this image", "Describe this image.", "What is in the picture?")
COUNT_QUESTIONS = ("How many objects are there?", "How many objects are in the picture?")
NUMBERS = ("zero", "one", "two", "three")
RELATIONS = ("to the left of", "to the right of", "above", "below")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question about one scene.

    `about` lists what the question names: shapes, colours, a relation. `words` gives (end, labels) for each word that
    refers to something in the scene, for the focus head.
    """

    task: str
    text: str
    answer: str
    about: tuple[str, ...] = field(default=(), compare=False)
    words: tuple[tuple[int, Labels], ...] = field(default=(), compare=False)


def ask(scene: Scene, task: str, rng: np.random.Generator) -> Question | None:
    """A question of this task about the scene, or None if the scene allows none."""
    return _MAKERS[task](scene, rng)


def caption(scene: Scene) -> str:
    """The only right caption."""
    names = [describe(thing) for thing in scene]
    if len(scene) == 1:
        return f"{names[0]} {at(scene[0])}"
    if len(scene) == 2:
        relation = "above" if scene[0].column == scene[1].column else "to the left of"
        return f"{names[0]} {relation} {names[1]}"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def describe(thing: Thing) -> str:
    return f"a {thing.size} {thing.color} {thing.shape}"


def at(thing: Thing) -> str:
    return f"at the {POSITIONS[thing.cell]}"


def plural(shape: str) -> str:
    return "crosses" if shape == "cross" else f"{shape}s"


def with_article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def holds(first: Thing, relation: str, second: Thing) -> bool:
    """Whether `first` is `relation` `second`, by columns or rows."""
    return {
        "to the left of": first.column < second.column,
        "to the right of": first.column > second.column,
        "above": first.row < second.row,
        "below": first.row > second.row,
    }[relation]


def pick(rng: np.random.Generator, values: Sequence[T]) -> T:
    """One of `values`, each equally often."""
    return values[int(rng.integers(len(values)))]


def _unique(scene: Scene, attribute: str) -> list[Thing]:
    counts = Counter(getattr(thing, attribute) for thing in scene)
    return [thing for thing in scene if counts[getattr(thing, attribute)] == 1]


def _asked(task: str, text: str, answer: str, *about: str, words: Mapping[str, Labels] | None = None) -> Question:
    """A question; `words` are words of the text that refer to something in the scene, in the text's order."""
    ends = tuple((text.index(word) + len(word), labels) for word, labels in (words or {}).items())
    return Question(task=task, text=text, answer=answer, about=about, words=ends)


def _caption(scene: Scene, rng: np.random.Generator) -> Question:
    weights = (0.6, 0.2, 0.2)
    return _asked("caption", CAPTION_QUESTIONS[int(rng.choice(3, p=weights))], caption(scene))


def _count(scene: Scene, rng: np.random.Generator) -> Question:
    return _asked("count", pick(rng, COUNT_QUESTIONS), NUMBERS[len(scene)])


def _count_of(scene: Scene, rng: np.random.Generator, *, attribute: str) -> Question:
    """How many objects have a shape or a colour. The name is any name in 35 % of the cases, else one in the scene."""
    names = SHAPES if attribute == "shape" else COLOR_NAMES
    present = [getattr(thing, attribute) for thing in scene]
    name = pick(rng, names) if rng.random() < 0.35 else pick(rng, present)
    word, number = plural(name) if attribute == "shape" else name, present.count(name)
    text = f"How many {word if attribute == 'shape' else f'{word} objects'} are there?"
    return _asked(f"count_{attribute}", text, NUMBERS[number], name, words={word: count_labels(number)})


def _of_one(
    scene: Scene,
    rng: np.random.Generator,
    *,
    task: str,
    text: str,
    answer: Callable[[Thing], str],
    named_by: str = "shape",
) -> Question | None:
    """A question about an object that its shape (or colour) identifies uniquely.

    `text` has a placeholder for the object.
    """
    things = _unique(scene, named_by)
    if not things:
        return None
    thing = pick(rng, things)
    word = getattr(thing, named_by)
    return _asked(task, text.format(thing), answer(thing), word, words={word: thing_labels(thing)})


def _exist(scene: Scene, rng: np.random.Generator) -> Question:
    present = {(thing.shape, thing.color) for thing in scene}
    if rng.random() < 0.5:
        shape, color = pick(rng, sorted(present))
    else:
        shape, color = _absent_kind(scene, present, rng)
    exists = (shape, color) in present
    text = f"Is there {with_article(f'{color} {shape}')}?"
    return _asked("exist", text, "yes" if exists else "no", color, shape, words={shape: exist_labels(exists)})


def _absent_kind(scene: Scene, present: set[tuple[str, str]], rng: np.random.Generator) -> tuple[str, str]:
    """A kind that is not present: mostly one that shares its shape or colour with an object, or mixes two objects."""
    while True:
        draw = rng.random()
        shape, color = pick(rng, SHAPES), pick(rng, COLOR_NAMES)
        if draw < 0.3:
            shape = pick(rng, scene).shape
        elif draw < 0.6:
            color = pick(rng, scene).color
        elif draw < 0.85 and len(scene) > 1:
            shape, color = pick(rng, scene).shape, pick(rng, scene).color
        if (shape, color) not in present:
            return shape, color


def _rel_yn(scene: Scene, rng: np.random.Generator) -> Question | None:
    things = _unique(scene, "shape")
    choices = [
        (first, relation, second)
        for first in things
        for second in things
        if first is not second
        for relation in RELATIONS
        if (first.row != second.row if relation in ("above", "below") else first.column != second.column)
    ]
    if not choices:
        return None
    first, relation, second = pick(rng, choices)
    text, answer = f"Is the {first.shape} {relation} the {second.shape}?", holds(first, relation, second)
    words = {thing.shape: thing_labels(thing) for thing in (first, second)}
    return _asked("rel_yn", text, "yes" if answer else "no", first.shape, relation, second.shape, words=words)


def _rel_what(scene: Scene, rng: np.random.Generator) -> Question | None:
    choices = []
    for thing in _unique(scene, "shape"):
        for relation in RELATIONS:
            there = [other for other in scene if other is not thing and holds(other, relation, thing)]
            if len(there) == 1:
                choices.append((thing, relation, there[0]))
    if not choices:
        return None
    thing, relation, other = pick(rng, choices)
    text, words = f"What is {relation} the {thing.shape}?", {thing.shape: thing_labels(thing)}
    return _asked("rel_what", text, describe(other), relation, thing.shape, words=words)


_MAKERS: dict[str, Callable[[Scene, np.random.Generator], Question | None]] = {
    "caption": _caption,
    "count": _count,
    "count_shape": partial(_count_of, attribute="shape"),
    "count_color": partial(_count_of, attribute="color"),
    "color": partial(_of_one, task="color", text="What color is the {0.shape}?", answer=lambda thing: thing.color),
    "shape": partial(
        _of_one,
        task="shape",
        text="What shape is the {0.color} object?",
        answer=lambda thing: thing.shape,
        named_by="color",
    ),
    "size": partial(_of_one, task="size", text="Is the {0.shape} large or small?", answer=lambda thing: thing.size),
    "where": partial(_of_one, task="where", text="Where is the {0.shape}?", answer=at),
    "exist": _exist,
    "rel_yn": _rel_yn,
    "rel_what": _rel_what,
}
TASKS = tuple(_MAKERS)


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
