"""Pictures in two classes for runs of `train`, and the flags that keep these runs short."""

import random
from pathlib import Path

from PIL import Image, ImageDraw

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
