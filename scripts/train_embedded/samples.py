"""Draws the sample pictures in assets/pictures, from seeds that training never uses, with questions about them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.train_embedded.pictures import SAMPLE_SEED
from scripts.train_embedded.questions import CAPTION_QUESTIONS, TASKS, Question, ask, caption
from scripts.train_embedded.render import Faults, draw_scene
from scripts.train_embedded.world import Scene, sample_scene

NUM_PLAIN, NUM_PAIRS = 20, 8


def draw_samples(folder: Path) -> None:
    """Write the pictures and questions.jsonl: {picture, task, question, answer} a line, the caption first."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for index in range(NUM_PLAIN + NUM_PAIRS):
        rng = np.random.default_rng([SAMPLE_SEED, index])
        with_pair = index >= NUM_PLAIN
        scene = sample_scene(rng, num_objects=1 + (index + 1) % 3, never_drawn="with" if with_pair else "without")
        # Noise makes PNG files ten times as large; noisy pictures become JPEG, which the world has as well.
        as_jpeg = index % 4 == 3
        faults = Faults(blur=0.1, noise=1.0 if as_jpeg else 0.0, jpeg=0.0)
        image = Image.fromarray(draw_scene(scene, rng, faults=faults))
        name = file_name(scene, index) + (".jpg" if as_jpeg else ".png")
        image.save(folder / name, quality=90, optimize=True)
        lines += [
            json.dumps({"picture": name, "task": each.task, "question": each.text, "answer": each.answer})
            for each in sample_questions(scene, rng)
        ]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")


def sample_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """The caption question and one of each other task that the scene allows."""
    asked = [Question(task="caption", text=CAPTION_QUESTIONS[0], answer=caption(scene))]
    for task in TASKS[1:]:
        question = ask(scene, task, rng)
        if question is not None:
            asked.append(question)
    return asked


def file_name(scene: Scene, index: int) -> str:
    """A name that says what is to be seen, such as 03-red-star-blue-ring."""
    return "-".join([f"{index + 1:02d}", *(f"{thing.color}-{thing.shape}" for thing in scene)])
