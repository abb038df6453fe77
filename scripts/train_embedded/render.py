"""Draws scenes: objects supersampled in their own boxes, backgrounds, and camera faults within the world's limits."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from scripts.train_embedded.world import COLORS, PICTURE_SIZE, Thing

Pixels = NDArray[np.uint8]
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """The probabilities that a picture is blurred, noisy or JPEG-compressed."""

    blur: float = 0.15
    noise: float = 0.3
    jpeg: float = 0.3


CLEAN = Faults(blur=0.0, noise=0.0, jpeg=0.0)


def draw_scene(
    things: Sequence[Thing],
    rng: np.random.Generator,
    *,
    colors: Sequence[tuple[int, int, int]] | None = None,
    faults: Faults = Faults(),
) -> Pixels:
    """Draw placed things; gives uint8 (224, 224, 3) RGB. `colors` overrides the things' own colours."""
    canvas = background(rng)
    for index, thing in enumerate(things):
        base = COLORS[thing.color] if colors is None else colors[index]
        color = np.clip(np.asarray(base) + rng.uniform(-14, 14, size=3), 0, 255)
        _blend(canvas, thing, color.astype(np.float32), rng)
    return _with_faults(canvas, rng, faults)


def background(rng: np.random.Generator) -> NDArray[np.float32]:
    """A mid-tone background of low saturation: flat, a linear gradient or soft clouds; float32 (224, 224, 3)."""
    kind = rng.random()
    first = _mid_tone(rng)
    if kind < 0.34:
        return np.array(np.broadcast_to(first, (PICTURE_SIZE, PICTURE_SIZE, 3)))
    second = _mid_tone(rng)
    if kind < 0.67:
        angle = rng.uniform(0, 2 * math.pi)
        axis = np.linspace(-0.5, 0.5, PICTURE_SIZE, dtype=np.float32)
        ramp = axis[None, :] * math.cos(angle) + axis[:, None] * math.sin(angle)
        mix = np.clip(0.5 + ramp / 1.2, 0, 1)
    else:
        cells = int(rng.integers(3, 8))
        clouds = Image.fromarray(rng.random((cells, cells), dtype=np.float32))
        soft = clouds.resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.BICUBIC)
        mix = np.clip(np.asarray(soft, dtype=np.float32), 0, 1)
    canvas: NDArray[np.float32] = first + (second - first) * mix[:, :, None].astype(np.float32)
    return canvas


def _mid_tone(rng: np.random.Generator) -> NDArray[np.float32]:
    level = rng.uniform(95, 185)
    tint = rng.uniform(-14, 14, size=3)
    return np.asarray(level + tint - tint.mean(), dtype=np.float32)


def _blend(canvas: NDArray[np.float32], thing: Thing, color: NDArray[np.float32], rng: np.random.Generator) -> None:
    half = math.ceil(thing.radius * 1.22) + 2
    left, top = round(thing.x) - half, round(thing.y) - half
    # Sometimes one sample per pixel, because other programs draw without antialiasing.
    samples = int(rng.choice((1, 2, 3, 4), p=(0.1, 0.2, 0.3, 0.4)))
    mask = _mask(thing, rng, half=half, samples=samples, offset=(thing.x - left, thing.y - top))
    x0, y0 = max(left, 0), max(top, 0)
    x1, y1 = min(left + 2 * half, PICTURE_SIZE), min(top + 2 * half, PICTURE_SIZE)
    cover = mask[y0 - top : y1 - top, x0 - left : x1 - left, None]
    region = canvas[y0:y1, x0:x1]
    region += (color - region) * cover


def _mask(
    thing: Thing, rng: np.random.Generator, *, half: int, samples: int, offset: tuple[float, float]
) -> NDArray[np.float32]:
    """The share of each pixel of the box that the object covers, 0..1."""
    image = Image.new("L", (2 * half * samples,) * 2)
    draw = ImageDraw.Draw(image)
    center = (offset[0] * samples, offset[1] * samples)
    radius = thing.radius * samples
    if thing.shape in ("circle", "ring", "moon"):
        _draw_round(draw, thing.shape, center, radius, rng)
    else:
        turn = math.radians(rng.uniform(-18, 18))
        draw.polygon(_placed(outline(thing.shape, rng), center, radius, turn), fill=255)
    if samples > 1:
        image = image.reduce(samples)
    return np.asarray(image, dtype=np.float32) / np.float32(255)


def _draw_round(
    draw: ImageDraw.ImageDraw, shape: str, center: tuple[float, float], radius: float, rng: np.random.Generator
) -> None:
    def disc(share: float, fill: int, shift: tuple[float, float] = (0.0, 0.0)) -> None:
        x, y = center[0] + shift[0] * radius, center[1] + shift[1] * radius
        reach = share * radius
        draw.ellipse((x - reach, y - reach, x + reach, y + reach), fill=fill)

    if shape == "circle":
        disc(0.95, 255)
    elif shape == "ring":
        disc(rng.uniform(0.93, 1.0), 255)
        disc(rng.uniform(0.50, 0.62), 0)
    else:
        turn = math.radians(rng.uniform(-36, 36)) + (math.pi if rng.random() < 0.5 else 0.0)
        distance = rng.uniform(0.42, 0.55)
        disc(0.97, 255)
        disc(0.80, 0, (distance * math.cos(turn), distance * math.sin(turn)))


def _around(count: int, radii: Sequence[float]) -> Points:
    angles = [2 * math.pi * index / count for index in range(count)]
    return [
        (radii[index % len(radii)] * math.sin(angle), -radii[index % len(radii)] * math.cos(angle))
        for index, angle in enumerate(angles)
    ]


# Corners of the shapes that are always drawn alike. The last four have no name in the sentences.
OUTLINES: dict[str, Points] = {
    "square": [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)],
    "triangle": _around(3, [1.0]),
    "hexagon": _around(6, [1.0]),
    "diamond": [(0.0, -1.0), (0.62, 0.0), (0.0, 1.0), (-0.62, 0.0)],
    "bar": [(-1.0, -0.35), (1.0, -0.35), (1.0, 0.35), (-1.0, 0.35)],
    "arrow": [(-1, -0.25), (0.1, -0.25), (0.1, -0.7), (1, 0), (0.1, 0.7), (0.1, 0.25), (-1, 0.25)],
}


def outline(shape: str, rng: np.random.Generator) -> Points:
    """Corners of an unrotated shape with circumradius 1; y points down. Raises KeyError for other shapes."""
    if shape == "star":
        return _around(10, [1.0, rng.uniform(0.38, 0.48)])
    if shape == "cross":
        arm, end = rng.uniform(0.25, 0.34), rng.uniform(0.93, 1.0)
        corner = [(arm, -end), (arm, -arm), (end, -arm)]
        return [_quarter_turns(x, y, quarters) for quarters in range(4) for x, y in corner]
    return _heart(rng) if shape == "heart" else OUTLINES[shape]


def _quarter_turns(x: float, y: float, quarters: int) -> tuple[float, float]:
    for _ in range(quarters):
        x, y = -y, x
    return x, y


def _heart(rng: np.random.Generator) -> Points:
    """One of three kinds of heart, slightly stretched, because renderers draw this shape most differently."""
    steps = np.linspace(0, 2 * math.pi, 60, endpoint=False)
    kind = int(rng.integers(3))
    if kind == 0:  # the well-known parametric curve
        x = 16 * np.sin(steps) ** 3
        y = -(13 * np.cos(steps) - 5 * np.cos(2 * steps) - 2 * np.cos(3 * steps) - np.cos(4 * steps))
    elif kind == 1:  # two lobes over a point
        lobe, side = rng.uniform(0.46, 0.56), rng.uniform(0.40, 0.50)
        angles = np.linspace(-0.9, 0.72 * math.pi, 20)
        x = side + lobe * np.sin(angles)
        y = -rng.uniform(0.25, 0.4) - lobe * np.cos(angles)
        x, y = np.concatenate([x, [0.0], -x[::-1]]), np.concatenate([y, [rng.uniform(0.8, 0.98)], y[::-1]])
    else:  # the plump implicit curve (x^2 + y^2 - 1)^3 = x^2 y^3
        reach = _implicit_heart(steps)
        x, y = reach * np.cos(steps), -reach * np.sin(steps)
    x = x * rng.uniform(0.9, 1.1)
    y = y - (y.max() + y.min()) / 2 + rng.uniform(-0.06, 0.06) * np.ptp(y)
    scale = rng.uniform(0.9, 1.02) / np.hypot(x, y).max()
    return [(float(scale * across), float(scale * down)) for across, down in zip(x, y, strict=True)]


def _implicit_heart(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance of the curve from its centre in each direction, by bisection."""
    low, high = np.zeros_like(angles), np.full_like(angles, 1.5)
    for _ in range(30):
        middle = (low + high) / 2
        x, y = middle * np.cos(angles), middle * np.sin(angles)
        inside = (x**2 + y**2 - 1) ** 3 < x**2 * y**3
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return low


def _placed(points: Points, center: tuple[float, float], radius: float, turn: float) -> Points:
    cos, sin = math.cos(turn), math.sin(turn)
    return [(center[0] + radius * (x * cos - y * sin), center[1] + radius * (x * sin + y * cos)) for x, y in points]


def _with_faults(canvas: NDArray[np.float32], rng: np.random.Generator, faults: Faults) -> Pixels:
    blurred, noisy, compressed = rng.random(3) < (faults.blur, faults.noise, faults.jpeg)
    if blurred:
        image = Image.fromarray(_to_bytes(canvas))
        softer = ImageFilter.GaussianBlur(rng.uniform(0.3, 1.4)) if rng.random() < 0.7 else ImageFilter.BoxBlur(1)
        canvas = np.asarray(image.filter(softer), dtype=np.float32)
    if noisy:
        # Either grey noise, or independent noise in each channel.
        shape = canvas.shape if rng.random() < 0.6 else (*canvas.shape[:2], 1)
        canvas = canvas + rng.standard_normal(shape, dtype=np.float32) * np.float32(rng.uniform(1, 7))
    pixels = _to_bytes(canvas)
    if compressed:
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=int(rng.integers(55, 96)))
        pixels = np.asarray(Image.open(stream))
    return pixels


def _to_bytes(canvas: NDArray[np.float32]) -> Pixels:
    return np.asarray(np.clip(canvas + 0.5, 0, 255), dtype=np.uint8)
