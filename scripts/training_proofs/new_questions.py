"""Questions about drawings of its world that the embedded model cannot answer: a new relation and a new word.

Each drawing comes with one new question and some old ones. The column `part` of the tables marks them `new` or `old`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scripts.train_embedded.pictures import PROOF_SEED
from scripts.train_embedded.questions import TASKS, Question, ask
from scripts.train_embedded.render import draw_scene
from scripts.train_embedded.wordings import outside, reword
from scripts.train_embedded.world import Scene, in_order, place, sample_scene

WARM, COLD = ("red", "orange", "yellow"), ("green", "blue", "purple")  # white and black are neither
CORNERS = (0, 2, 6, 8)  # cells of the grid of 3 x 3
OLD_A_PICTURE = 2
_OUTSIDE_SHARE = 0.125  # as in the embedded model's training
_KNOWN_SHARE = 0.5
_NEW_WORDS = re.compile(r"warm|cold|diagonal|opposite", re.IGNORECASE)
SPLITS = ("train", "val", "test")

Maker = Callable[[Scene, np.random.Generator], Question | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTask:
    """A new kind of question: a part of its seeds, the number of objects (None: one to three), and its maker."""

    seed: int
    num_objects: int | None
    make: Maker


def _corners(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Whether two objects are in opposite corners: true for half of the drawings; a quarter has corners of one side."""
    cells = {thing.cell for thing in scene}
    are_opposite = cells in ({0, 8}, {2, 6})
    share = 1.0 if are_opposite else 0.25 if cells <= set(CORNERS) else 0.02
    if rng.random() >= share:
        return None
    text = "Are the two objects in opposite corners?"
    return Question(task="corners", text=text, answer="yes" if are_opposite else "no")


def _warm(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Whether an object's colour is warm."""
    shapes = [thing.shape for thing in scene]
    found = [thing for thing in scene if shapes.count(thing.shape) == 1 and thing.color in (*WARM, *COLD)]
    if not found:
        return None
    thing = found[int(rng.integers(len(found)))]
    return Question(task="warm", text=f"Is the {thing.shape} warm?", answer="yes" if thing.color in WARM else "no")


NEW_TASKS: Mapping[str, NewTask] = {
    "corners": NewTask(seed=1, num_objects=2, make=_corners),
    "warm": NewTask(seed=2, num_objects=None, make=_warm),
}


def write_drawings(folder: Path, task: str, *, counts: tuple[int, int, int], seed: int) -> None:
    """Write drawings for a new task, and tables that list them.

    `counts` are the numbers of drawings for training, validation and testing. `folder/new.jsonl` has the new question
    about each drawing. `folder/mixed.jsonl` also has two old questions about each drawing that is not for testing.
    """
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    new: list[dict[str, Any]] = []
    mixed: list[dict[str, Any]] = []
    for number, (split, count) in enumerate(zip(SPLITS, counts, strict=True)):
        rng = np.random.default_rng([PROOF_SEED, NEW_TASKS[task].seed, seed, number])
        for index in range(count):
            scene, question = _asked_scene(task, rng)
            name = f"pictures/{split}-{index:04d}.png"
            Image.fromarray(draw_scene(scene, rng)).save(folder / name)
            row = {"picture": name, "split": split}
            new.append(row | _asked(question, part="new"))
            mixed.append(new[-1])
            if split != "test":
                old = {each.text: each for each in (old_question(scene, rng) for _ in range(OLD_A_PICTURE))}
                mixed += [row | _asked(each, part="old") for each in old.values()]
    write_table(folder / "new.jsonl", new)
    write_table(folder / "mixed.jsonl", mixed)


def old_question(scene: Scene, rng: np.random.Generator) -> Question:
    """A question from the embedded model's training: in known words, in other words, or without an answer."""
    if rng.random() < _OUTSIDE_SHARE:
        while True:
            unanswered = outside(rng)
            if not _NEW_WORDS.search(unanswered.text):  # questions with the new words now have an answer
                return unanswered
    question = None
    while question is None:
        question = ask(scene, TASKS[int(rng.integers(len(TASKS)))], rng)
    return question if rng.random() < _KNOWN_SHARE else reword(question, scene, rng)


def _asked_scene(task: str, rng: np.random.Generator) -> tuple[Scene, Question]:
    new = NEW_TASKS[task]
    while True:
        scene = sample_scene(rng, num_objects=new.num_objects, placed=False)
        question = new.make(scene, rng)
        placed = None if question is None else place(rng, scene)
        if question is not None and placed is not None:
            return in_order(placed), question


def _asked(question: Question, *, part: str) -> dict[str, str]:
    return {"question": question.text, "answer": question.answer, "part": part}


def write_table(path: Path, rows: Sequence[object]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
