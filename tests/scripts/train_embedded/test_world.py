"""The rules of drawing: positions, distances, and the pairs that training never sees."""

import numpy as np
import pytest

from scripts.train_embedded.world import (
    CELL_CENTERS,
    JITTER,
    MIN_GAP,
    NEVER_DRAWN,
    PICTURE_SIZE,
    RADII,
    sample_scene,
    scene_from_words,
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


def test_scenes_are_named_left_column_first_and_from_top_to_bottom() -> None:
    scene = scene_from_words(
        [
            ("small", "red", "star", "right"),
            ("large", "blue", "ring", "bottom left"),
            ("small", "green", "moon", "top left"),
        ]
    )
    assert [thing.shape for thing in scene] == ["moon", "ring", "star"]


def test_training_scenes_hold_no_never_drawn_pair() -> None:
    rng = np.random.default_rng(2)
    scenes = [sample_scene(rng, num_objects=count) for count in (1, 2, 3, 6) for _ in range(60)]
    assert not any((thing.shape, thing.color) in NEVER_DRAWN for scene in scenes for thing in scene)
