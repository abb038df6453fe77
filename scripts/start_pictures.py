"""Pictures of invented things in many classes, from which `train_start_tower.py` teaches a picture tower.

A class is a random plan of parts: bodies with limbs, strokes, compounds of simple shapes, or rows of small marks. Its
instances differ in the places, bends and widths of the parts, and every picture in position, turn, size, elastic
deformation, colours, light, background, blur and noise. Nothing comes from a photograph or a data set.
"""

# B pictures, T templates, S pixels a side

import math
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

SIDE, _TEMPLATE, _DRAWN = 112, 80, 240  # pixels of pictures, of templates, and of the canvas of a template
_NOISES = 384  # backgrounds

Part = tuple[str, list[tuple[float, float]], float, int]  # kind, points in 0..1, width, tone (-1 is a hole)


def plan(rng: np.random.Generator) -> list[Part]:
    """The parts of a class."""
    parts = (_limbs, _limbs, _strokes, _compound, _rows)[int(rng.integers(5))](rng)
    low = np.min([np.min(points, 0) - width for _, points, width, _ in parts], 0)
    high = np.max([np.max(points, 0) + width for _, points, width, _ in parts], 0)
    middle, size = (low + high) / 2, 0.8 / float(np.max(high - low))  # all classes fill the canvas
    return [
        (kind, [tuple((np.array(point) - middle) * size + 0.5) for point in points], width * size, tone)
        for kind, points, width, tone in parts
    ]


def _around(centre: tuple[float, float], angle: float, length: float) -> tuple[float, float]:
    return centre[0] + length * math.cos(angle), centre[1] + length * math.sin(angle)


def _limbs(rng: np.random.Generator) -> list[Part]:
    centre = tuple(rng.uniform(0.4, 0.6, 2))
    radius, width = rng.uniform(0.08, 0.2), rng.uniform(0.04, 0.11)
    tones = [255, int(rng.integers(60, 256))]
    parts: list[Part] = [
        ("blob", [centre, _around(centre, rng.uniform(0, 6.3), radius * rng.uniform(0, 0.8))], radius, 255)
    ]
    spread, first, count = rng.uniform(1.5, 6.3), rng.uniform(0, 6.3), int(rng.integers(2, 7))
    for number in range(count):
        angle = first + spread * number / count
        points = [_around(centre, angle, radius * rng.uniform(0.3, 0.9))]
        for _ in range(int(rng.integers(1, 4))):
            points.append(_around(points[-1], angle, rng.uniform(0.06, 0.17)))
            angle += rng.choice([0.0, 0.0, rng.uniform(-1.6, 1.6)])
        parts.append(("line", points, width * rng.uniform(0.8, 1.2), tones[int(rng.integers(2))]))
    return parts


def _strokes(rng: np.random.Generator) -> list[Part]:
    width, parts = rng.uniform(0.02, 0.09), []
    places = [tuple(place) for place in rng.uniform(0.15, 0.85, (5, 2))]
    for _ in range(int(rng.integers(1, 6))):
        first, last = (places[index] for index in rng.choice(5, 2, replace=False))
        bend = rng.choice([0.0, rng.uniform(-0.5, 0.5)])
        middle = (
            (first[0] + last[0]) / 2 - bend * (last[1] - first[1]),
            (first[1] + last[1]) / 2 + bend * (last[0] - first[0]),
        )
        points = [
            tuple(
                (1 - t) ** 2 * a + 2 * t * (1 - t) * (2 * m - (a + b) / 2) + t * t * b
                for a, m, b in zip(first, middle, last, strict=True)
            )
            for t in np.linspace(0, 1, 7)
        ]
        parts.append(("line", points, width, 255))
    return parts


def _compound(rng: np.random.Generator) -> list[Part]:
    parts, place, angle = [], tuple(rng.uniform(0.25, 0.5, 2)), rng.uniform(0, 6.3)
    for number in range(int(rng.integers(2, 5))):
        kind = rng.choice(["blob", "poly", "poly", "line", "ring"])
        size = rng.uniform(0.05, 0.2)
        tone = int(rng.integers(40, 256)) if number == 0 or rng.random() < 0.85 else -1
        if kind == "poly":
            sides, turn, long = int(rng.integers(3, 7)), rng.uniform(0, 6.3), rng.uniform(0.3, 1.5)
            points = []
            for side in range(sides):
                x, y = size * math.cos(6.2832 * side / sides), size * long * math.sin(6.2832 * side / sides)
                points.append(
                    (
                        place[0] + x * math.cos(turn) - y * math.sin(turn),
                        place[1] + x * math.sin(turn) + y * math.cos(turn),
                    )
                )
        else:
            points = [place, _around(place, angle, size * rng.uniform(0.3, 3))]
        parts.append((str(kind), points, size * (1 if kind == "blob" else 0.4), tone))
        place = _around(place, angle, rng.uniform(0.08, 0.3))
        angle += rng.uniform(-1, 1)
    return parts


def _rows(rng: np.random.Generator) -> list[Part]:
    parts: list[Part] = []
    rows, columns, width = int(rng.integers(2, 12)), int(rng.integers(1, 6)), rng.uniform(0.2, 0.7)
    ragged, lean = rng.choice([0.0, rng.uniform(0, 0.6)]), rng.uniform(-0.3, 0.3)
    is_box, skipped = rng.random() < 0.4, rng.random((rows, columns)) < rng.choice([0.0, 0.4])
    for row in range(rows):
        for column in range(columns):
            if skipped[row, column] and row + column > 0:
                continue
            x, y, wide = (
                0.1 + 0.8 * column / columns,
                0.12 + 0.76 * row / rows,
                0.8 / columns * 0.8 * (1 - ragged * rng.random()),
            )
            high = 0.76 / rows * width
            corners = [(x, y), (x + wide, y + lean * 0.1), (x + wide, y + high + lean * 0.1), (x, y + high)]
            parts.append(("line", [*corners, corners[0]], 0.012, 255) if is_box else ("poly", corners, 0.0, 255))
    return parts


def template(parts: list[Part], rng: np.random.Generator, *, is_outlined: bool) -> np.ndarray[Any, Any]:
    """An instance of a class: its mask and the tones of its parts, uint8 (2, S, S)."""
    mask, tones = (Image.new("L", (_DRAWN, _DRAWN)) for _ in range(2))
    layers = [ImageDraw.Draw(mask), ImageDraw.Draw(tones)]
    loose, thick = rng.uniform(0, 0.018), math.exp(rng.normal(0, 0.15))
    is_few = len(parts) < 12
    for kind, points, width, tone in parts:
        moved = [
            (x + dx, y + dy)
            for (x, y), (dx, dy) in zip(
                points, rng.normal(0, loose if is_few else loose / 4, (len(points), 2)), strict=True
            )
        ]
        spots = [(x * _DRAWN, y * _DRAWN) for x, y in moved]
        size = width * _DRAWN * thick
        for layer, fill in zip(layers, (0 if tone < 0 else 255, max(tone, 0)), strict=True):
            if is_outlined and layer is layers[1] and tone > 0:
                _draw(layer, kind, spots, size + 4, 0)
            _draw(layer, kind, spots, size, fill)
    return np.stack([np.asarray(one.resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BOX)) for one in (mask, tones)])


def _draw(layer: ImageDraw.ImageDraw, kind: str, spots: list[tuple[float, float]], size: float, fill: int) -> None:
    if kind == "poly":
        layer.polygon(spots, fill=fill)
    elif kind == "ring":
        (x, y), radius = spots[0], size * 1.5
        layer.ellipse((x - radius, y - radius, x + radius, y + radius), outline=fill, width=max(1, round(size * 0.5)))
    else:
        half = size if kind == "blob" else size / 2
        layer.line(spots, fill=fill, width=max(1, round(2 * half)))
        for x, y in spots:
            layer.ellipse((x - half, y - half, x + half, y + half), fill=fill)


def templates(num_classes: int, *, each: int, seed: int) -> Tensor:
    """Instances of all classes, uint8 (classes * each, 2, S, S)."""
    found = []
    for number in range(num_classes):
        rng = np.random.default_rng([seed, number])
        parts, is_outlined = plan(rng), bool(rng.random() < 0.5)
        found += [template(parts, rng, is_outlined=is_outlined) for _ in range(each)]
    return torch.from_numpy(np.stack(found))


def noises(seed: int) -> Tensor:
    """Coloured noise of several roughnesses, with mean 0 and deviation 1, (N, 3, S, S)."""
    random = torch.Generator().manual_seed(seed)
    frequency = torch.fft.fftfreq(SIDE)[:, None].hypot(torch.fft.fftfreq(SIDE)[None]).clamp(min=1 / SIDE)
    power = torch.rand(_NOISES, 1, 1, 1, generator=random) * 1.6 + 0.6
    white = torch.randn(_NOISES, 3, SIDE, SIDE, generator=random)
    white = white.lerp(white.mean(1, keepdim=True) * 3**0.5, torch.rand(_NOISES, 1, 1, 1, generator=random))
    noise = torch.fft.ifft2(torch.fft.fft2(white) * frequency**-power).real
    hard = torch.rand(_NOISES, 1, 1, 1, generator=random) < 0.3  # patches with borders
    noise = noise / noise.std((2, 3), keepdim=True)
    return torch.where(hard, (noise * 1.5).round() / 1.5, noise).half()


def pictures(
    masks_TSS: Tensor, noise: Tensor, labels_B: Tensor, *, each: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Pictures of classes in 0..255, (B, 3, S, S), and the thing's mask and tones in 0..1, (B, 2, S, S)."""
    count = len(labels_B)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *(shape or (1, 1, 1)), generator=random) * (high - low) + low

    def chance(share: float) -> Tensor:
        return (torch.rand(count, 1, 1, 1, generator=random) < share).float()

    def drawn(labels: Tensor, sizes: tuple[float, float], turn: float, shift: float) -> Tensor:
        which = labels * each + torch.randint(each, (count,), generator=random)
        angle, size, aspect, shear = (
            uniform(-turn, turn, 1),
            1 / uniform(*sizes, 1),
            uniform(-0.15, 0.15, 1).exp(),
            uniform(-0.15, 0.15, 1),
        )
        cos, sin = angle.cos() * size, angle.sin() * size
        across, down = uniform(-shift, shift, 1) * size, uniform(-shift, shift, 1) * size
        rows = torch.cat([cos * aspect, shear - sin, across, sin, cos / aspect, down], 1).view(count, 2, 3)
        grid = F.affine_grid(rows, [count, 2, SIDE, SIDE], align_corners=False)
        bend = torch.randn(count, 2, 4, 4, generator=random) * uniform(0, 0.07)
        bend = F.interpolate(F.interpolate(bend, size=14, mode="bicubic"), size=SIDE, mode="bilinear")
        grid += bend.permute(0, 2, 3, 1)
        return F.grid_sample(masks_TSS[which].float() / 255, grid, align_corners=False)

    def texture(most: float) -> Tensor:
        return noise[torch.randint(len(noise), (count,), generator=random)].float() * (uniform(0, 1) ** 2 * most)

    line = torch.linspace(-1, 1, SIDE)
    light = uniform(-1, 1) * line[:, None] + uniform(-1, 1) * line[None]
    ground, colours = uniform(0, 255, 3, 1, 1), [uniform(0, 255, 3, 1, 1) for _ in range(2)]
    grey = chance(0.3)
    ground, colours = (
        ground.lerp(ground.mean(1, keepdim=True), grey),
        [one.lerp(one.mean(1, keepdim=True), grey) for one in colours],
    )
    # The thing differs from its ground by at least 45 levels on average.
    gap = (colours[0] - ground).mean(1, keepdim=True)
    colours[0] += (60 - gap.abs()).clamp(min=0) * torch.where(gap + ground.mean(1, keepdim=True) - 127 > 0, -1.0, 1.0)
    behind = ground + texture(35)
    other = drawn(torch.randint(len(masks_TSS) // each, (count,), generator=random), (0.6, 2.5), math.pi, 1.0)
    behind = behind.lerp(uniform(0, 255, 3, 1, 1), other[:, :1] * chance(0.4) * uniform(0.1, 0.7))
    where_B2SS = drawn(labels_B, (0.65, 1.15), math.radians(20), 0.2)
    mask, tone = where_B2SS[:, :1], where_B2SS[:, 1:]
    soft = F.avg_pool2d(mask, 7)
    slopes = F.pad(soft[..., 2:] - soft[..., :-2], (1, 1)), F.pad(soft[..., 2:, :] - soft[..., :-2, :], (0, 0, 1, 1))
    bump = F.interpolate(slopes[0] * uniform(-1, 1) + slopes[1] * uniform(-1, 1), size=SIDE, mode="bilinear")
    soft = F.interpolate(soft, size=SIDE, mode="bilinear")
    inner = tone / mask.clamp(min=0.05)
    front = (
        colours[0]
        + (colours[1] - colours[0]) * (1 - inner).clamp(0, 1) * uniform(0.2, 1)
        + bump * uniform(0, 130)
        + texture(15)
    )
    shadow = torch.roll(soft, (3, 3), (2, 3)) * chance(0.3) * uniform(0, 60)
    found = (behind - shadow).lerp(front, mask) + light * uniform(0, 40)
    found = found.lerp(_blurred(found), chance(0.4))
    found = found + torch.randn(count, 1, SIDE, SIDE, generator=random) * (uniform(0, 1) ** 3 * 20)
    return found.clamp(0, 255), where_B2SS


def _blurred(found: Tensor) -> Tensor:
    around = F.pad(found, (1, 1, 1, 1), mode="replicate")
    rows = around[..., :-2, :] + around[..., 1:-1, :] + around[..., 2:, :]
    return (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) / 9
