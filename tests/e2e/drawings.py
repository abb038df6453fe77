"""Folders of different drawings of the embedded model's world."""

from pathlib import Path

import numpy as np
from PIL import Image

from scripts.train_embedded.render import draw_scene
from scripts.train_embedded.world import sample_scene


def write_drawings(folder: Path, count: int, *, seed: int = 1) -> list[Path]:
    """Write `count` PNG files of 224 x 224 pixels; returns their paths in order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(count):
        rng = np.random.default_rng([4711, seed, index])
        path = folder / f"{index:06d}.png"
        Image.fromarray(draw_scene(sample_scene(rng), rng)).save(path, compress_level=1)
        paths.append(path)
    return paths
