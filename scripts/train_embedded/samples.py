"""Draws the sample pictures in assets/pictures from seeds that training never uses, with questions about them.

The first pictures are random. Those in `COMPOSED` add cases that the random ones lack. Invalid files go to
assets/broken.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.train_embedded.pictures import SAMPLE_SEED
from scripts.train_embedded.questions import CAPTION_QUESTIONS, TASKS, Question, ask, caption
from scripts.train_embedded.render import CLEAN, Faults, Pixels, draw_scene
from scripts.train_embedded.world import Scene, in_order, place, sample_scene, scene_from_words

NUM_PLAIN, NUM_PAIRS = 20, 8
NUM_ASKED = 3  # maximum number of questions per task about a composed picture
WHOLE = "03-purple-triangle.png"  # the sample that is truncated for assets/broken


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A drawn picture with its file name and questions."""

    name: str
    pixels: Pixels
    questions: tuple[Question, ...]  # the caption first


# Pictures described in words, a seed that gives the wanted background, faults, and the suffix of the file.
COMPOSED: tuple[tuple[str, int, Faults, str], ...] = (
    ("small orange circle top, large orange cross center", 108, CLEAN, ".png"),
    ("small green heart left, large white moon center, small blue square right", 118, CLEAN, ".png"),
    (
        "small yellow moon top left, large yellow moon center, small yellow moon bottom right",
        *(104, Faults(blur=1.0, noise=0.0, jpeg=0.0), ".png"),
    ),
    ("large orange cross bottom left, small white cross right", 101, Faults(blur=0.0, noise=1.0, jpeg=1.0), ".jpg"),
)


def draw_samples(folder: Path) -> None:
    """Write the pictures, questions.jsonl with {picture, task, question, answer} per line, and the folder `broken`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for sample in samples():
        Image.fromarray(sample.pixels).save(folder / sample.name, quality=90, optimize=True)
        lines += [
            json.dumps({"picture": sample.name, "task": each.task, "question": each.text, "answer": each.answer})
            for each in sample.questions
        ]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    write_broken(folder.parent / "broken", whole=folder / WHOLE)


def samples() -> Iterator[Sample]:
    """All sample pictures, in the order of their names."""
    for index in range(NUM_PLAIN + NUM_PAIRS):
        yield _drawn_at_random(index)
    for index, composed in enumerate(COMPOSED, NUM_PLAIN + NUM_PAIRS):
        yield _composed(*composed, index=index)


def write_broken(folder: Path, *, whole: Path) -> None:
    """Write a file for each of three errors: truncated (the first half of the PNG `whole`), text, and an empty file."""
    folder.mkdir(parents=True, exist_ok=True)
    content = whole.read_bytes()
    (folder / "truncated.png").write_bytes(content[: len(content) // 2])
    (folder / "text.jpg").write_text("This is a text, and not a picture.\n")
    (folder / "empty.png").write_bytes(b"")


def _drawn_at_random(index: int) -> Sample:
    rng = np.random.default_rng([SAMPLE_SEED, index])
    with_pair = index >= NUM_PLAIN
    scene = sample_scene(rng, num_objects=1 + (index + 1) % 3, never_drawn="with" if with_pair else "without")
    # Noise makes PNG files ten times as large, so noisy pictures become JPEG, which also occurs in the world.
    as_jpeg = index % 4 == 3
    faults = Faults(blur=0.1, noise=1.0 if as_jpeg else 0.0, jpeg=0.0)
    return Sample(
        name=file_name(scene, index) + (".jpg" if as_jpeg else ".png"),
        pixels=draw_scene(scene, rng, faults=faults),
        questions=tuple(sample_questions(scene, rng)),
    )


def _composed(text: str, seed: int, faults: Faults, suffix: str, *, index: int) -> Sample:
    rng = np.random.default_rng([SAMPLE_SEED, seed])
    things = place(rng, scene_from_words([thing.split(maxsplit=3) for thing in text.split(", ")]))
    if things is None:
        raise ValueError(f"no room for `{text}` with the seed {seed}: take another seed")
    scene = in_order(things)
    pixels = draw_scene(scene, rng, faults=faults)
    asked = [Question(task="caption", text=text, answer=caption(scene)) for text in CAPTION_QUESTIONS]
    for _ in range(NUM_ASKED):
        asked += [question for question in sample_questions(scene, rng) if question not in asked]
    return Sample(
        name=file_name(scene, index) + suffix,
        pixels=pixels,
        questions=tuple(sorted(asked, key=lambda question: TASKS.index(question.task))),
    )


def sample_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """The caption question, and one question of each other task that the scene allows."""
    asked = [Question(task="caption", text=CAPTION_QUESTIONS[0], answer=caption(scene))]
    for task in TASKS[1:]:
        question = ask(scene, task, rng)
        if question is not None:
            asked.append(question)
    return asked


def file_name(scene: Scene, index: int) -> str:
    """A name that describes the scene, such as 03-red-star-blue-ring."""
    return "-".join([f"{index + 1:02d}", *(f"{thing.color}-{thing.shape}" for thing in scene)])
