"""The rules of drawing: positions, distances, and colours without a name. test_samples.py compares pixels."""

import numpy as np
import pytest

from scripts.train_embedded.pictures import with_unnamed_kinds
from scripts.train_embedded.world import (
    CELL_CENTERS,
    COLORS,
    JITTER,
    MIN_GAP,
    PICTURE_SIZE,
    RADII,
    sample_scene,
)


@pytest.mark.parametrize("num_objects", [1, 2, 3, 6])
def test_objects_lie_inside_the_picture_in_their_cells_and_apart(num_objects: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        scene = sample_scene(rng, num_objects=num_objects)
        assert len({thing.cell for thing in scene}) == num_objects
        for thing in scene:
            low, high = RADII[thing.size]
            assert low <= thing.radius <= high
            for place, cell in ((thing.x, thing.column), (thing.y, thing.row)):
                assert thing.radius <= place <= PICTURE_SIZE - thing.radius
                # A large object that is pushed away from the edge leaves its cell's centre by a little more.
                assert abs(place - CELL_CENTERS[cell]) <= JITTER + 10
            for other in scene:
                if other is not thing:
                    distance = np.hypot(thing.x - other.x, thing.y - other.y)
                    assert distance >= thing.radius + other.radius + MIN_GAP


def test_unnamed_colours_are_far_from_every_named_one() -> None:
    rng = np.random.default_rng(6)
    for _ in range(40):
        scene = sample_scene(rng, num_objects=3)
        for thing, color in zip(*with_unnamed_kinds(scene, rng), strict=True):
            distance = min(np.abs(np.subtract(color, named)).sum() for named in COLORS.values())
            assert distance > 100 if thing.color == "other" else distance == 0
