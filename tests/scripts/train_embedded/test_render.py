"""Pixels: colours stay within their jitter, and shapes have the proportions defined for the world."""

import math

import numpy as np
import pytest

from scripts.train_embedded.pictures import with_unnamed_kinds
from scripts.train_embedded.render import CLEAN, background, draw_scene, outline
from scripts.train_embedded.world import COLORS, SHAPES, Thing, sample_scene

CENTER = 112


def _draw(shape: str, color: str, *, radius: float = 36, seed: int = 0) -> np.ndarray:
    thing = Thing(shape=shape, color=color, size="large", cell=4, x=CENTER, y=CENTER, radius=radius)
    return draw_scene([thing], np.random.default_rng(seed), faults=CLEAN).astype(int)


@pytest.mark.parametrize("color", COLORS)
def test_a_colour_stays_within_its_jitter(color: str) -> None:
    for seed in range(5):
        middle = _draw("square", color, seed=seed)[CENTER, CENTER]
        assert np.abs(middle - np.asarray(COLORS[color])).max() <= 15


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_drawn_within_its_own_reach_only(shape: str) -> None:
    pixels = _draw(shape, "red")
    empty = _draw(shape, "red", radius=1)
    rows, columns = np.nonzero(np.abs(pixels - empty).max(axis=-1) > 60)
    distances = np.hypot(rows - CENTER, columns - CENTER)
    assert 0.75 * 36 < distances.max() < 1.2 * 36


def test_rings_have_a_hole_and_circles_have_none() -> None:
    for seed in range(5):
        assert np.abs(_draw("ring", "red", seed=seed)[CENTER, CENTER] - COLORS["red"]).max() > 40
        assert np.abs(_draw("circle", "red", seed=seed)[CENTER, CENTER] - COLORS["red"]).max() <= 15


def test_stars_and_crosses_keep_their_proportions() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        radii = [math.hypot(x, y) for x, y in outline("star", rng)]
        assert len(radii) == 10
        assert max(radii) == pytest.approx(1)
        assert 0.38 <= min(radii) <= 0.48
        cross = outline("cross", rng)
        assert len(cross) == 12
        assert 0.25 <= min(abs(x) for x, _ in cross) <= 0.34


def test_backgrounds_are_mid_tones_of_low_saturation() -> None:
    for seed in range(60):
        canvas = background(np.random.default_rng(seed))
        luminance = canvas @ np.asarray([0.299, 0.587, 0.114])
        assert luminance.min() >= 90
        assert luminance.max() <= 195
        assert (canvas.max(axis=-1) - canvas.min(axis=-1)).max() < 60


def test_unnamed_colours_are_far_from_every_named_one() -> None:
    rng = np.random.default_rng(6)
    for _ in range(40):
        scene = sample_scene(rng, num_objects=3)
        for thing, color in zip(*with_unnamed_kinds(scene, rng), strict=True):
            distance = min(np.abs(np.subtract(color, named)).sum() for named in COLORS.values())
            assert distance > 100 if thing.color == "other" else distance == 0
