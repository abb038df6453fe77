"""Training pictures on disk: chunks of drawn scenes with labels. The rules of drawing are in world.py and render.py."""

import colorsys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.train_embedded.loop import shuffled_at
from scripts.train_embedded.render import Pixels, draw_scene
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
MADE_BY = {"pixels": "draw", "features": "features"}  # the stage that writes each kind of file
MAX_THINGS = 3
NOTHING, UNKNOWN = -1, -100  # no object there; an object whose kind has no name (ignored by the loss)
UNNAMED_SHAPES = ("hexagon", "diamond", "bar", "arrow")
# First numbers of every seed: training pictures, scored pictures and sample pictures never share one.
CROWD_SEED, SCENE_SEED, ODD_SEED, CHECK_SEED, PAIR_SEED, FRESH_SEED = 101, 202, 303, 404, 505, 606
SCORE_SEED, SAMPLE_SEED, FAMILIAR_SEED = 909, 777, 1212
_COUNTS = (0.2, 0.35, 0.45)  # one, two, three objects: pictures with more objects teach more

Drawn = tuple[Pixels, NDArray[np.int16]]


def draw_crowd_chunk(folder: Path, chunk: int) -> None:
    """Write `CHUNK_PICTURES` crowded pictures (mostly four to eight objects) with labels per patch."""
    rng = np.random.default_rng([CROWD_SEED, chunk])
    pixels = np.empty((CHUNK_PICTURES, PICTURE_SIZE, PICTURE_SIZE, 3), dtype=np.uint8)
    labels = np.empty((CHUNK_PICTURES, 4, 64), dtype=np.int16)
    for index in range(CHUNK_PICTURES):
        count = int(rng.integers(1, 4)) if rng.random() < 0.15 else int(rng.integers(4, 8))
        things, colors = with_unnamed_kinds(sample_scene(rng, num_objects=count), rng)
        pixels[index] = draw_scene(things, rng, colors=colors)
        labels[index] = _patch_labels(things)
    save_chunk(folder / f"crowd-{chunk:03d}-pixels.npy", pixels, labels)


def scene_to_labels(scene: Scene) -> NDArray[np.int16]:
    """(3, 4) numbers of shape, colour, size and cell, in the order of the sentences; NOTHING if there is no object."""
    labels = np.full((MAX_THINGS, 4), NOTHING, dtype=np.int16)
    for row, thing in enumerate(scene):
        labels[row] = _numbers(thing)
    return labels


def _numbers(thing: Thing) -> tuple[int, int, int, int]:
    """Shape, colour, size and cell; UNKNOWN for a kind without a name."""
    return (
        SHAPES.index(thing.shape) if thing.shape in SHAPES else UNKNOWN,
        COLOR_NAMES.index(thing.color) if thing.color in COLORS else UNKNOWN,
        SIZES.index(thing.size),
        thing.cell,
    )


class Chunks:
    """Arrays of one kind on disk, such as `pixels` or `features`, and their labels, in chunks of `CHUNK_PICTURES`."""

    def __init__(self, folder: Path, kind: str, what: str) -> None:
        """Map all finished chunks. Raises FileNotFoundError if there are none."""
        paths = sorted(folder.glob(f"{kind}-*-{what}.npy"))
        if not paths:
            raise FileNotFoundError(f"no {what} of kind {kind} in {folder}; run the stage `{MADE_BY[what]}` first")
        self.arrays = [np.load(path, mmap_mode="r") for path in paths]
        self.labels = [np.load(path.with_name(path.name.replace(what, "labels"))) for path in paths]

    def batch_at(self, step: int, *, batch_size: int, seed: int) -> tuple[NDArray[Any], NDArray[np.int16]]:
        """Batch `step` of an endless pass over all pictures: arrays and labels."""
        drawn = shuffled_at(step, count=len(self.arrays) * CHUNK_PICTURES, batch_size=batch_size, seed=seed)
        places = [divmod(int(place), CHUNK_PICTURES) for place in drawn]
        return (
            np.stack([self.arrays[chunk][row] for chunk, row in places]),
            np.stack([self.labels[chunk][row] for chunk, row in places]),
        )


def save_chunk(place: Path, values: NDArray[Any], labels: NDArray[np.int16]) -> None:
    """Write FOLDER/KIND-CHUNK-WHAT.npy, completely or not at all, and the labels in the same folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    np.save(place.with_name(f"{place.stem.rpartition('-')[0]}-labels.npy"), labels)
    unfinished = place.with_name(f"unfinished-{place.name}")
    np.save(unfinished, values)
    unfinished.rename(place)


def with_unnamed_kinds(scene: Scene, rng: np.random.Generator) -> tuple[list[Thing], list[tuple[int, int, int]]]:
    """Replace some colours and shapes by unnamed ones, so that the two are learned separately."""
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
    """(4, 64) labels: shape, colour, size and cell of the thing that covers a patch; UNKNOWN if partly covered."""
    grid = (np.arange(PICTURE_SIZE // 7) + 0.5) * 7  # 4 x 4 points in each patch
    labels = np.full((4, 8, 8), NOTHING, dtype=np.int16)
    for thing in things:
        inside = (grid[None, :] - thing.x) ** 2 + (grid[:, None] - thing.y) ** 2 < (0.9 * thing.radius) ** 2
        hits = inside.reshape(8, 4, 8, 4).sum(axis=(1, 3))
        labels[:, (hits > 0) & (hits < 4) & (labels[0] == NOTHING)] = UNKNOWN
        labels[:, hits >= 4] = np.asarray(_numbers(thing), dtype=np.int16)[:, None]
    return labels.reshape(4, 64)


def _draw(
    rng: np.random.Generator,
    *,
    counts: Sequence[float] | None = None,
    never_drawn: str = "without",
    unnamed: bool = False,
) -> Drawn:
    """A picture and its labels. `counts` are the shares of one to three objects."""
    count = None if counts is None else int(rng.choice((1, 2, 3), p=counts))
    scene = sample_scene(rng, num_objects=count, never_drawn=never_drawn)
    things, colors = with_unnamed_kinds(scene, rng) if unnamed else (scene, None)
    return draw_scene(things, rng, colors=colors), scene_to_labels(tuple(things))


# scene: pictures for questions. odd: with shapes and colours that have no name. check and pair: for evaluation, never
# trained on; pair has never-drawn pairs.
KINDS: dict[str, tuple[int, Callable[[np.random.Generator], Drawn]]] = {
    "scene": (SCENE_SEED, partial(_draw, counts=_COUNTS)),
    "odd": (ODD_SEED, partial(_draw, counts=_COUNTS, unnamed=True)),
    "check": (CHECK_SEED, _draw),
    "pair": (PAIR_SEED, partial(_draw, never_drawn="with")),
}
