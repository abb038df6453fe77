"""Pictures in two classes for runs of `train`, jobs on tables, and the prepared data of a job."""

import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from llama_adapter.app.learning.training.asking import Asker
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.prepare import TrainingData, prepare, read_data
from llama_adapter.llm.tokenizer import Tokenizer
from tests.app.golden import GOLDEN
from tests.app.learning.labelled.tables import write_lines

CLASSES = ("ring", "triangle")


def draw_pets(folder: Path, *, each: int, seed: int = 0) -> Path:
    """Draw a folder of different pictures for each class; returns their parent folder."""
    drawn = random.Random(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            ground, ink = (tuple(drawn.randrange(*span) for _ in range(3)) for span in ((180, 256), (0, 120)))
            picture = Image.new("RGB", (64, 64), ground)
            x, y = drawn.randrange(4, 28), drawn.randrange(4, 28)
            pen = ImageDraw.Draw(picture)
            if name == "ring":
                pen.ellipse((x, y, x + 30, y + 30), outline=ink, width=7)
            else:
                pen.polygon(((x, y + 30), (x + 15, y), (x + 30, y + 30)), fill=ink)
            picture.save(folder / name / f"{number}.png")
    return folder


def job_of(folder: Path, *rows: dict[str, Any], **settings: Any) -> TrainJob:
    """A job on a table in a folder, for a model of width 64; without other settings, it writes `a.pth` there."""
    table = write_lines(folder / "a.jsonl", *rows)
    return TrainJob(**{"data": (str(table),), "out": str(folder / "a.pth"), **settings}).with_rate(width=64)


def prepared(job: TrainJob) -> TrainingData:
    """The data of a job in tokens of the tiny model, whose context is 512."""
    asker = Asker(Tokenizer.load(GOLDEN / "LLaMA/tokenizer.model"), default_prompt="Describe it")
    return prepare(job, read_data(job), asker=asker, context=512)
