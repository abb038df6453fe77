"""Drawings of ten tools with random colours and proportions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 192  # of a drawing, in pixels
_MIDDLE = SIDE // 2
_CLEAR = (0, 0, 0, 0)

Colour = tuple[int, int, int, int]


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """A random integer from `low` to `high`, both included."""
    return int(rng.integers(low, high, endpoint=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pen:
    """What the drawing of a tool needs."""

    draw: ImageDraw.ImageDraw
    rng: np.random.Generator
    handle: Colour
    head: Colour
    width: int  # of handles and lines, in pixels

    def vary(self, most: int) -> int:
        """A random length up to `most` pixels."""
        return between(self.rng, 0, most)


def draw_tool(kind: str, rng: np.random.Generator) -> Image.Image:
    """A tool of `TOOLS` on a transparent ground, `SIDE` pixels wide and high."""
    image = Image.new("RGBA", (SIDE, SIDE))
    handle, head = ((between(rng, 0, 255), between(rng, 0, 255), between(rng, 0, 255), 255) for _ in ("handle", "head"))
    pen = Pen(draw=ImageDraw.Draw(image), rng=rng, handle=handle, head=head, width=between(rng, 10, 20))
    TOOLS[kind](pen)
    return image


def _hammer(pen: Pen) -> None:
    pen.draw.rectangle((_MIDDLE - pen.width // 2, 50, _MIDDLE + pen.width // 2, 175), fill=pen.handle)
    pen.draw.rectangle((50 - pen.vary(12), 28, 142 + pen.vary(12), 62 + pen.vary(8)), fill=pen.head)


def _saw(pen: Pen) -> None:
    y = 80 + pen.vary(20)
    pen.draw.polygon([(60, y - 20), (180, y - 5 - pen.vary(13)), (180, y + 10), (60, y + 24)], fill=pen.head)
    for x in range(60, 180, 12):
        pen.draw.polygon([(x, y + 20), (x + 12, y + 20), (x + 6, y + 34)], fill=pen.head)
    pen.draw.rounded_rectangle((14, y - 28, 62, y + 34), 10, fill=pen.handle)
    pen.draw.rectangle((28, y - 12, 46, y + 16), fill=_CLEAR)


def _wrench(pen: Pen) -> None:
    pen.draw.rectangle((_MIDDLE - pen.width // 2, 55, _MIDDLE + pen.width // 2, 150), fill=pen.handle)
    pen.draw.ellipse((62, 14, 130, 82), fill=pen.handle)
    pen.draw.polygon([(84, 0), (108, 0), (104, 52), (88, 52)], fill=_CLEAR)
    pen.draw.ellipse((72, 135, 120, 183), fill=pen.handle)
    pen.draw.ellipse((86, 149, 106, 169), fill=_CLEAR)


def _screwdriver(pen: Pen) -> None:
    pen.draw.rounded_rectangle((78 - pen.vary(6), 14, 114 + pen.vary(6), 88), 12, fill=pen.handle)
    pen.draw.rectangle((91, 88, 101, 165), fill=pen.head)
    pen.draw.polygon([(91, 165), (101, 165), (106, 182), (86, 182)], fill=pen.head)


def _scissors(pen: Pen) -> None:
    for x, opposite in ((60, 125), (132, 67)):
        pen.draw.line((x, 20, opposite, 130), fill=pen.head, width=pen.width - 2)
        pen.draw.ellipse((x - 26, 120, x + 26, 178), outline=pen.handle, width=pen.width - 2)


def _brush(pen: Pen) -> None:
    pen.draw.rectangle((90, 70, 102, 180), fill=pen.handle)
    pen.draw.rectangle((70, 46, 122, 74), fill=pen.head)
    for x in range(70, 122, 6):
        pen.draw.rectangle((x, 12 + pen.vary(6), x + 4, 46), fill=pen.handle)


def _key(pen: Pen) -> None:
    pen.draw.ellipse((62, 12, 130, 80), outline=pen.handle, width=pen.width)
    pen.draw.rectangle((90, 76, 102, 178), fill=pen.handle)
    for y in (130, 150, 166):
        pen.draw.rectangle((102, y, 116 + pen.vary(12), y + 8), fill=pen.handle)


def _spade(pen: Pen) -> None:
    pen.draw.rectangle((90, 16, 102, 110), fill=pen.handle)
    pen.draw.rectangle((74, 10, 118, 20), fill=pen.handle)
    pen.draw.polygon([(66, 106), (126, 106), (122, 150), (96, 184), (70, 150)], fill=pen.head)


def _axe(pen: Pen) -> None:
    pen.draw.rectangle((90, 16, 102, 180), fill=pen.handle)
    pen.draw.polygon([(100, 26), (150, 12), (158, 48), (150, 86), (100, 66)], fill=pen.head)


def _clamp(pen: Pen) -> None:
    pen.draw.line([(140, 30), (50, 30), (50, 165), (140, 165)], fill=pen.handle, width=pen.width)
    pen.draw.rectangle((124, 30, 138, 80), fill=pen.head)
    pen.draw.rectangle((116, 74, 146, 84), fill=pen.head)


TOOLS: Mapping[str, Callable[[Pen], None]] = {
    "hammer": _hammer,
    "saw": _saw,
    "wrench": _wrench,
    "screwdriver": _screwdriver,
    "scissors": _scissors,
    "brush": _brush,
    "key": _key,
    "spade": _spade,
    "axe": _axe,
    "clamp": _clamp,
}
