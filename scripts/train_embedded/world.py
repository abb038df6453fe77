"""The world of the embedded model: possible scenes and how they are sampled.

Pixels and sentences are not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "heart", "moon")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (210, 30, 35),
    "orange": (245, 135, 20),
    "yellow": (245, 225, 40),
    "green": (35, 150, 55),
    "blue": (35, 75, 210),
    "purple": (130, 45, 165),
    "white": (248, 248, 248),
    "black": (15, 15, 18),
}
COLOR_NAMES = tuple(COLORS)
SIZES = ("small", "large")
COLUMNS = ("left", "", "right")
POSITIONS = tuple(f"{row} {column}".strip() or "center" for row in ("top", "", "bottom") for column in COLUMNS)
# Left out of every training picture, so that pictures with one measure generalisation.
NEVER_DRAWN = frozenset(
    zip(SHAPES, ("orange", "blue", "black", "yellow", "purple", "red", "green", "white"), strict=True)
)
PICTURE_SIZE = 224
CELL_CENTERS = (37, 112, 187)
JITTER = 13
MIN_GAP = 4
RADII: dict[str, tuple[float, float]] = {"small": (18, 22), "large": (32, 39)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """One object: its words, and its centre and circumradius in pixels."""

    shape: str
    color: str
    size: str
    cell: int  # 0..8, row by row
    x: float = 0.0
    y: float = 0.0
    radius: float = 0.0

    @property
    def column(self) -> int:
        return self.cell % 3

    @property
    def row(self) -> int:
        return self.cell // 3

    @property
    def is_never_drawn(self) -> bool:
        return (self.shape, self.color) in NEVER_DRAWN


Scene = tuple[Thing, ...]  # in the order of the sentences: by column from the left, within a column from top to bottom


def in_order(things: Sequence[Thing]) -> Scene:
    """The things in the order in which sentences name them."""
    return tuple(sorted(things, key=lambda thing: (thing.column, thing.row)))


def sample_scene(
    rng: np.random.Generator,
    *,
    num_objects: int | None = None,
    never_drawn: str = "without",
    placed: bool = True,
) -> Scene:
    """A scene of `num_objects` things (by default one to three, evenly).

    With `never_drawn` "without", never-drawn pairs are left out; with "with", at least one occurs; with "any", chance
    decides. With `placed` False the things have cells but no pixel positions; sentences need only cells.
    """
    while True:
        count = int(rng.integers(1, 4)) if num_objects is None else num_objects
        kinds = _sample_kinds(rng, count)
        has_pair = any(kind in NEVER_DRAWN for kind in kinds)
        if (never_drawn == "without" and has_pair) or (never_drawn == "with" and not has_pair):
            continue
        sizes = [SIZES[int(rng.integers(2))] for _ in kinds]
        cells = [int(cell) for cell in rng.permutation(9)[:count]]
        things = [
            Thing(shape=shape, color=color, size=size, cell=cell)
            for (shape, color), size, cell in zip(kinds, sizes, cells, strict=True)
        ]
        if not placed:
            return in_order(things)
        scene = place(rng, things)
        if scene is not None:
            return in_order(scene)


def _sample_kinds(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Shapes and colours. Some are repeated on purpose; otherwise counting would rarely give two or three."""
    shapes = [SHAPES[int(index)] for index in rng.integers(0, 8, size=count)]
    colors = [COLOR_NAMES[int(index)] for index in rng.integers(0, 8, size=count)]
    if count > 1:
        for names in (shapes, colors):
            if rng.random() < 0.25:
                source, target = rng.permutation(count)[:2]
                names[target] = names[source]
                if count == 3 and rng.random() < 0.4:
                    names[:] = [names[source]] * count
    return list(zip(shapes, colors, strict=True))


def place(rng: np.random.Generator, things: Sequence[Thing], *, tries: int = 12) -> list[Thing] | None:
    """Give every thing a radius and a centre in its cell, inside the picture and apart from others.

    None if that fails.
    """
    for _ in range(tries):
        placed: list[Thing] = []
        for thing in things:
            radius = float(rng.uniform(*RADII[thing.size]))
            # A square's corners lie beyond the circumradius; the edge of the picture must not cut them off.
            reach = radius * (1.17 if thing.shape == "square" else 1.0) + 1
            x, y = (
                float(np.clip(CELL_CENTERS[place] + rng.uniform(-JITTER, JITTER), reach, PICTURE_SIZE - reach))
                for place in (thing.column, thing.row)
            )
            if any(np.hypot(x - other.x, y - other.y) < radius + other.radius + MIN_GAP for other in placed):
                break
            placed.append(replace(thing, x=x, y=y, radius=radius))
        else:
            return placed
    return None


def scene_from_words(words: Sequence[Sequence[str]]) -> Scene:
    """A scene without pixels from (size, color, shape, position) words, for tests and examples."""
    return in_order(
        [
            Thing(shape=shape, color=color, size=size, cell=POSITIONS.index(position))
            for size, color, shape, position in words
        ]
    )
