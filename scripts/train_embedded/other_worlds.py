"""Drawn pictures outside the embedded model's world, by kind, to test its out-of-distribution detection.

The first kinds are easy to detect; the last ones are shapes of the world that break its rules.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image, ImageDraw

from scripts.train_embedded.grammar import WORDS
from scripts.train_embedded.pictures import UNNAMED_SHAPES
from scripts.train_embedded.render import Pixels, background, draw_scene
from scripts.train_embedded.world import PICTURE_SIZE, sample_scene

Color = tuple[int, int, int]
Draw = Callable[[np.random.Generator], Pixels]


def draw_others(kind: str, *, count: int, seed: Sequence[int]) -> list[Pixels]:
    """`count` pictures of one of `KINDS`, uint8 (224, 224, 3) RGB, determined by `seed`.

    Raises KeyError for other kinds.
    """
    draw, number = KINDS[kind], list(KINDS).index(kind)
    rng = np.random.default_rng([*seed, number])
    return [draw(rng) for _ in range(count)]


def _noise(rng: np.random.Generator) -> Pixels:
    """Every pixel, or every square of a few pixels, has its own colour."""
    cells = PICTURE_SIZE // int(rng.choice((1, 2, 7, 14)))
    image = Image.fromarray(rng.integers(0, 256, size=(cells, cells, 3), dtype=np.uint8))
    return np.array(image.resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.NEAREST))


def _text(rng: np.random.Generator) -> Pixels:
    """Lines of words on paper, sometimes light on dark."""
    paper, ink = sorted((int(rng.integers(0, 60)), int(rng.integers(200, 256))), reverse=bool(rng.random() < 0.8))
    canvas = Image.new("L", (PICTURE_SIZE, PICTURE_SIZE), paper)
    brush, height = ImageDraw.Draw(canvas), int(rng.integers(10, 30))
    for top in range(8, PICTURE_SIZE - height, int(height * 1.4)):
        words = " ".join(rng.choice(WORDS["printed"], size=14))
        brush.text((8, top), words, fill=ink, font_size=height)
    return np.array(canvas.convert("RGB"))


def _line_drawing(rng: np.random.Generator) -> Pixels:
    """Thin dark outlines of boxes, ovals and strokes on white."""
    canvas = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "white")
    brush = ImageDraw.Draw(canvas)
    for _ in range(int(rng.integers(4, 10))):
        x, y = (float(side) for side in rng.uniform(5, 160, size=2))
        width, height = (float(side) for side in rng.uniform(20, 60, size=2))
        box = (x, y, x + width, y + height)
        pen = int(rng.integers(1, 4))
        match int(rng.integers(3)):
            case 0:
                brush.rectangle(box, outline="black", width=pen)
            case 1:
                brush.ellipse(box, outline="black", width=pen)
            case _:
                brush.line(box, fill="black", width=pen)
    return np.array(canvas)


def _face(rng: np.random.Generator) -> Pixels:
    """A drawn face that fills the picture: eyes, nose and mouth on a round head."""
    canvas = Image.fromarray(background(rng).astype(np.uint8))
    brush = ImageDraw.Draw(canvas)
    x, y = (float(side) for side in rng.uniform(100, 124, size=2))
    head = float(rng.uniform(70, 95))
    skin = _color(rng, (150, 100, 70), (250, 210, 180))
    brush.ellipse((x - head, y - head, x + head, y + head), fill=skin, outline=(40, 30, 20), width=3)
    for side in (-1, 1):
        eye = x + side * head * 0.4
        brush.ellipse((eye - 10, y - 35, eye + 10, y - 15), fill="white")
        brush.ellipse((eye - 4, y - 29, eye + 4, y - 21), fill="black")
    brush.line((x, y - 10, x - 6, y + 12, x + 4, y + 12), fill=(90, 50, 40), width=3)
    brush.arc((x - 30, y + 5, x + 30, y + 45), 20, 160, fill=(150, 30, 40), width=5)
    return np.array(canvas)


def _plot(rng: np.random.Generator) -> Pixels:
    """Axes with bars or a curve on white."""
    canvas = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "white")
    brush = ImageDraw.Draw(canvas)
    brush.line((24, 10, 24, 200, 216, 200), fill="black")
    color = _color(rng, (20, 20, 20), (200, 200, 200))
    heights = rng.uniform(15, 180, size=8)
    if rng.random() < 0.5:
        for place, height in enumerate(heights):
            brush.rectangle((32 + place * 23, 200 - float(height), 48 + place * 23, 199), fill=color)
    else:
        points = [(32 + place * 24, 200 - float(height)) for place, height in enumerate(heights)]
        brush.line(points, fill=color, width=2)
    for place in range(5):
        brush.text((2, 190 - place * 42), str(place * 10), fill="black")
    return np.array(canvas)


def _landscape(rng: np.random.Generator) -> Pixels:
    """Sky, hills, a sun and houses: large coloured areas, as in a child's drawing."""
    canvas = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), _color(rng, (120, 120, 120), (240, 240, 240)))
    brush = ImageDraw.Draw(canvas)
    sun = float(rng.uniform(20, 180))
    brush.ellipse((sun, 12, sun + 36, 48), fill=(250, 220, 60))
    ground = float(rng.uniform(110, 160))
    phase = float(rng.uniform(0, 6))
    hills = [(float(x), ground + 18 * math.sin(x / 40 + phase)) for x in range(0, PICTURE_SIZE + 8, 8)]
    brush.polygon([*hills, (PICTURE_SIZE, PICTURE_SIZE), (0, PICTURE_SIZE)], fill=(70, 140, 60))
    for _ in range(int(rng.integers(1, 4))):
        x = float(rng.uniform(5, 160))
        wall = _color(rng, (80, 80, 80), (230, 230, 230))
        brush.rectangle((x, ground + 10, x + 44, ground + 48), fill=wall)
        brush.polygon([(x - 5, ground + 10), (x + 22, ground - 18), (x + 49, ground + 10)], fill=(150, 50, 40))
    return np.array(canvas)


def _stripes(rng: np.random.Generator) -> Pixels:
    """Stripes or squares of two colours over the whole picture."""
    step, turn = int(rng.integers(6, 40)), float(rng.uniform(0, math.pi))
    y, x = np.mgrid[:PICTURE_SIZE, :PICTURE_SIZE]
    is_second = np.floor((x * math.cos(turn) + y * math.sin(turn)) / step) % 2 > 0
    if rng.random() < 0.5:
        is_second ^= np.floor((y * math.cos(turn) - x * math.sin(turn)) / step) % 2 > 0
    first, second = rng.integers(0, 256, size=(2, 3), dtype=np.uint8)
    return np.asarray(np.where(is_second[..., None], second, first), dtype=np.uint8)


def _blank(rng: np.random.Generator) -> Pixels:
    """One colour: black, white or any other."""
    color = rng.choice((0, 255, *rng.integers(0, 256, size=2))) if rng.random() < 0.5 else rng.integers(0, 256, size=3)
    return np.full((PICTURE_SIZE, PICTURE_SIZE, 3), color, dtype=np.uint8)


def _empty(rng: np.random.Generator) -> Pixels:
    """A background of the world without objects."""
    return np.clip(background(rng), 0, 255).astype(np.uint8)


def _in_mode(rng: np.random.Generator, *, mode: str) -> Pixels:
    """A picture of the world in another mode of Pillow: grey tones, or black and white only."""
    return np.array(Image.fromarray(_own(rng)).convert(mode).convert("RGB"))


def _grey_objects(rng: np.random.Generator) -> Pixels:
    """The world's shapes in grey tones, which have no name in the world."""
    scene = sample_scene(rng)
    tones = [int(tone) for tone in rng.choice((60, 80, 200, 215), size=len(scene))]
    return draw_scene(scene, rng, colors=[(tone, tone, tone) for tone in tones])


def _unnamed_shapes(rng: np.random.Generator) -> Pixels:
    """Hexagons, diamonds, bars and arrows in place of all objects of a picture."""
    return draw_scene([replace(thing, shape=str(rng.choice(UNNAMED_SHAPES))) for thing in sample_scene(rng)], rng)


def _halved(rng: np.random.Generator) -> Pixels:
    """A picture of the world at half its size, on black or white."""
    canvas = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "black" if rng.random() < 0.5 else "white")
    half = PICTURE_SIZE // 2
    place = tuple(int(side) for side in rng.integers(0, half, size=2))
    canvas.paste(Image.fromarray(_own(rng)).resize((half, half), Image.Resampling.BICUBIC), (place[0], place[1]))
    return np.array(canvas)


def _doubled(rng: np.random.Generator) -> Pixels:
    """The middle of a picture of the world, twice as large."""
    quarter = PICTURE_SIZE // 4
    middle = Image.fromarray(_own(rng)).crop((quarter, quarter, 3 * quarter, 3 * quarter))
    return np.array(middle.resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.BICUBIC))


def _rotated(rng: np.random.Generator) -> Pixels:
    """A picture of the world turned by 90, 180 or 270 degrees."""
    return np.ascontiguousarray(np.rot90(_own(rng), k=int(rng.integers(1, 4))))


def _four_or_more(rng: np.random.Generator) -> Pixels:
    """Four to six objects of the world."""
    return draw_scene(sample_scene(rng, num_objects=int(rng.integers(4, 7))), rng)


def _color(rng: np.random.Generator, least: Color, most: Color) -> Color:
    """A colour with each channel from `least` to below `most`."""
    red, green, blue = (int(part) for part in rng.integers(least, most))
    return red, green, blue


def _own(rng: np.random.Generator) -> Pixels:
    return draw_scene(sample_scene(rng), rng)


KINDS: dict[str, Draw] = {
    "noise": _noise,
    "text": _text,
    "line drawings": _line_drawing,
    "faces": _face,
    "plots": _plot,
    "landscapes": _landscape,
    "stripes and squares": _stripes,
    "one colour": _blank,
    "no object": _empty,
    "in grey tones": partial(_in_mode, mode="L"),
    "in black and white": partial(_in_mode, mode="1"),
    "grey objects": _grey_objects,
    "unnamed shapes": _unnamed_shapes,
    "half size": _halved,
    "double size": _doubled,
    "turned": _rotated,
    "four to six objects": _four_or_more,
}
