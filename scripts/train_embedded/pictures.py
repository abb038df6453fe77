"""Training pictures on disk: chunks of drawn scenes with their labels. Drawing rules live in world.py and render.py."""

import colorsys
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.train_embedded.loop import shuffled_at
from scripts.train_embedded.render import draw_scene
from scripts.train_embedded.world import (
    COLOR_NAMES,
    COLORS,
    PICTURE_SIZE,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    sample_scene,
)

CHUNK_PICTURES = 2000
MAX_THINGS = 3
NOTHING, UNKNOWN = -1, -100  # no object there; an object whose kind has no name (ignored by the loss)
PATCH = 28
UNNAMED_SHAPES = ("hexagon", "diamond", "bar", "arrow")
# First words of every seed: training pictures, scored pictures and sample pictures never share one.
CROWD_SEED, SCENE_SEED, ODD_SEED, CHECK_SEED, PAIR_SEED, FRESH_SEED = 101, 202, 303, 404, 505, 606
SCORE_SEED, SAMPLE_SEED, FAMILIAR_SEED = 909, 777, 1212


def draw_crowd_chunk(folder: Path, chunk: int) -> Path:
    """Write `CHUNK_PICTURES` crowded pictures (mostly four to eight objects) with labels per patch."""
    rng = np.random.default_rng([CROWD_SEED, chunk])
    pixels = np.empty((CHUNK_PICTURES, PICTURE_SIZE, PICTURE_SIZE, 3), dtype=np.uint8)
    labels = np.empty((CHUNK_PICTURES, 4, 64), dtype=np.int16)
    for index in range(CHUNK_PICTURES):
        count = int(rng.integers(1, 4)) if rng.random() < 0.15 else int(rng.integers(4, 8))
        scene = sample_scene(rng, num_objects=count)
        things, colors = with_unnamed_kinds(scene, rng)
        pixels[index] = draw_scene(things, rng, colors=colors)
        labels[index] = _patch_labels(things)
    return _save(folder, "crowd", chunk, pixels, labels)


def scene_to_labels(scene: Scene) -> NDArray[np.int16]:
    """(3, 4) numbers of shape, colour, size and cell, in the order of the sentences; NOTHING for no object."""
    labels = np.full((MAX_THINGS, 4), NOTHING, dtype=np.int16)
    for row, thing in enumerate(scene):
        labels[row] = (
            SHAPES.index(thing.shape) if thing.shape in SHAPES else UNKNOWN,
            COLOR_NAMES.index(thing.color) if thing.color in COLORS else UNKNOWN,
            SIZES.index(thing.size),
            thing.cell,
        )
    return labels


def labels_to_scene(labels: NDArray[np.int16]) -> Scene:
    """Inverse of `scene_to_labels`, without pixels."""
    return tuple(
        Thing(shape=SHAPES[shape], color=COLOR_NAMES[color], size=SIZES[size], cell=int(cell))
        for shape, color, size, cell in labels
        if shape != NOTHING
    )


def chunk_paths(folder: Path, kind: str) -> list[tuple[Path, Path]]:
    """Finished chunks as pairs of (pixels, labels) files, in order."""
    pixels = sorted(folder.glob(f"{kind}-*-pixels.npy"))
    return [(path, path.with_name(path.name.replace("pixels", "labels"))) for path in pixels]


class Crowd:
    """The crowded pictures on disk: pixels uint8 (2000, 224, 224, 3) and labels int16 (2000, 4, 64) a chunk."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError if there are none."""
        chunks = chunk_paths(folder, "crowd")
        if not chunks:
            raise FileNotFoundError(f"no pictures in {folder}; run the stage `draw` first")
        self._pixels = [np.load(path, mmap_mode="r") for path, _ in chunks]
        self._labels = [np.load(path) for _, path in chunks]

    def batch_at(self, step: int, *, batch_size: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
        """Batch `step` of an endless walk through all pictures: pixels and labels."""
        drawn = shuffled_at(step, count=len(self._pixels) * CHUNK_PICTURES, batch_size=batch_size, seed=seed)
        places = [divmod(int(place), CHUNK_PICTURES) for place in drawn]
        return (
            np.stack([self._pixels[chunk][row] for chunk, row in places]),
            np.stack([self._labels[chunk][row] for chunk, row in places]),
        )


def _save(folder: Path, kind: str, chunk: int, pixels: NDArray[np.uint8], labels: NDArray[np.int16]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{chunk:03d}-pixels.npy"
    unfinished = folder / f"unfinished-{kind}-{chunk:03d}.npy"
    np.save(folder / f"{kind}-{chunk:03d}-labels.npy", labels)
    np.save(unfinished, pixels)
    unfinished.rename(path)  # a chunk is there whole or not at all
    return path


def with_unnamed_kinds(scene: Scene, rng: np.random.Generator) -> tuple[list[Thing], list[tuple[int, int, int]]]:
    """Replace some colours and shapes by ones without a name, so that both are learned separately."""
    things, colors = [], []
    for thing in scene:
        color = COLORS[thing.color]
        if rng.random() < 0.25:
            thing, color = replace(thing, color="other"), _unnamed_color(rng)
        elif rng.random() < 0.12:
            thing = replace(thing, shape=str(rng.choice(UNNAMED_SHAPES)))
        things.append(thing)
        colors.append(color)
    return things, colors


def _unnamed_color(rng: np.random.Generator) -> tuple[int, int, int]:
    """A saturated colour far from all named ones, so that it cannot form a never-drawn pair."""
    while True:
        share = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.45, 1.0), rng.uniform(0.35, 1.0))
        color = np.asarray(share) * 255
        if all(np.abs(color - np.asarray(named)).sum() > 110 for named in COLORS.values()):
            return int(color[0]), int(color[1]), int(color[2])


def _patch_labels(things: list[Thing]) -> NDArray[np.int16]:
    """(4, 64): shape, colour, size and cell of the thing that covers a patch; UNKNOWN if it covers only a part."""
    grid = (np.arange(PICTURE_SIZE // 7) + 0.5) * 7  # 4 x 4 points in each patch
    labels = np.full((4, 8, 8), NOTHING, dtype=np.int16)
    for thing in things:
        inside = (grid[None, :] - thing.x) ** 2 + (grid[:, None] - thing.y) ** 2 < (0.9 * thing.radius) ** 2
        hits = inside.reshape(8, 4, 8, 4).sum(axis=(1, 3))
        labels[:, (hits > 0) & (hits < 4) & (labels[0] == NOTHING)] = UNKNOWN
        names = (
            SHAPES.index(thing.shape) if thing.shape in SHAPES else UNKNOWN,
            COLOR_NAMES.index(thing.color) if thing.color in COLORS else UNKNOWN,
            SIZES.index(thing.size),
            thing.cell,
        )
        labels[:, hits >= 4] = np.asarray(names, dtype=np.int16)[:, None]
    return labels.reshape(4, 64)
