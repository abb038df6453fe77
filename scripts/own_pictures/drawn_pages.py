"""Drawings of ten kinds of pages, with dashes in place of words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from scripts.own_pictures.drawn_tools import between

WIDTH, HEIGHT = 160, 208  # in pixels
_STRIP = 44  # width of the table beside a receipt
_TABLE = 90  # its grey level


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """What the drawing of a page needs."""

    draw: ImageDraw.ImageDraw
    rng: np.random.Generator
    ink: int  # grey level
    left: int  # the margin, in pixels, which is also that at the top
    right: int
    bottom: int

    def write(self, left: int, top: int, right: int, bottom: int, *, step: int = 6) -> None:
        """Fill a box with lines of dashes; a quarter of the lines ends early."""
        for y in range(top, bottom, step):
            is_short = self.rng.random() < 0.25
            end = right - (between(self.rng, 0, (right - left) // 2) if is_short else 0)
            x = left
            while x < end:
                word = between(self.rng, 4, 14)
                self.draw.line((x, y, min(x + word, end), y), fill=self.ink, width=2)
                x += word + 3


def draw_page(kind: str, rng: np.random.Generator) -> Image.Image:
    """A page of `PAGES` in grey levels, `WIDTH` x `HEIGHT` pixels."""
    image = Image.new("L", (WIDTH, HEIGHT), between(rng, 225, 255))
    ink, margin = between(rng, 20, 80), between(rng, 12, 20)
    draw = ImageDraw.Draw(image)
    PAGES[kind](Sheet(draw=draw, rng=rng, ink=ink, left=margin, right=WIDTH - margin, bottom=HEIGHT - margin))
    return image


def _invoice(sheet: Sheet) -> None:
    left, right = sheet.left, sheet.right
    sheet.draw.rectangle((left, left, left + 30, left + 14), fill=sheet.ink)
    sheet.write(right - 50, left, right, left + 24)
    sheet.write(left, 60, right - 60, 80)
    sheet.draw.rectangle((left, 100, right, 160), outline=sheet.ink)
    for y in range(110, 160, 10):
        sheet.draw.line((left, y, right, y), fill=sheet.ink)
    sheet.write(right - 40, 168, right, 180)


def _letter(sheet: Sheet) -> None:
    left, right = sheet.left, sheet.right
    sheet.write(right - 50, left, right, left + 18)
    sheet.write(left, 60, right, 60 + between(sheet.rng, 70, 110))
    sheet.write(left, 186, left + 40, 190)


def _form(sheet: Sheet) -> None:
    left = sheet.left
    for y in range(left + 10, sheet.bottom, 16):
        sheet.draw.rectangle((left + 50, y - 8, sheet.right, y + 2), outline=sheet.ink)
        sheet.write(left, y - 4, left + 40, y)


def _table(sheet: Sheet) -> None:
    left, right, bottom = sheet.left, sheet.right, sheet.bottom
    for y in range(left, bottom, 12):
        sheet.draw.line((left, y, right, y), fill=sheet.ink)
    for x in range(left, right + 1, (right - left) // 4):
        sheet.draw.line((x, left, x, bottom), fill=sheet.ink)


def _columns(sheet: Sheet) -> None:
    sheet.write(sheet.left, sheet.left, WIDTH // 2 - 4, sheet.bottom)
    sheet.write(WIDTH // 2 + 4, sheet.left, sheet.right, sheet.bottom)


def _full(sheet: Sheet) -> None:
    sheet.write(sheet.left, sheet.left, sheet.right, sheet.bottom)


def _round_stamp(sheet: Sheet) -> None:
    _full(sheet)
    x, y = between(sheet.rng, 50, 110), between(sheet.rng, 60, 150)
    radius = between(sheet.rng, 22, 32)
    for inner, width in ((radius, 3), (radius - 7, 2)):
        sheet.draw.ellipse((x - inner, y - inner, x + inner, y + inner), outline=sheet.ink, width=width)


def _box_stamp(sheet: Sheet) -> None:
    _full(sheet)
    x, y = between(sheet.rng, 20, 80), between(sheet.rng, 40, 150)
    sheet.draw.rectangle((x, y, x + 60, y + 24), outline=sheet.ink, width=4)
    sheet.draw.line((x + 6, y + 12, x + 54, y + 12), fill=sheet.ink, width=6)


def _receipt(sheet: Sheet) -> None:
    sheet.draw.rectangle((0, 0, _STRIP, HEIGHT), fill=_TABLE)
    sheet.draw.rectangle((WIDTH - _STRIP, 0, WIDTH, HEIGHT), fill=_TABLE)
    sheet.write(_STRIP + 8, sheet.left, WIDTH - _STRIP - 8, sheet.bottom, step=8)
    sheet.draw.line((_STRIP + 8, 150, WIDTH - _STRIP - 8, 150), fill=sheet.ink, width=2)


def _cover(sheet: Sheet) -> None:
    left, right = sheet.left, sheet.right
    sheet.draw.rectangle((left + 10, 60, right - 10, 84), fill=sheet.ink)
    sheet.write(left + 30, 100, right - 30, 112)
    sheet.write(left + 40, 180, right - 40, 186)


def _list(sheet: Sheet) -> None:
    left = sheet.left
    for y in range(left, sheet.bottom, 12):
        sheet.draw.ellipse((left, y - 3, left + 5, y + 2), fill=sheet.ink)
        sheet.write(left + 12, y, sheet.right - between(sheet.rng, 0, 60), y + 3, step=12)


PAGES: Mapping[str, Callable[[Sheet], None]] = {
    "invoice": _invoice,
    "letter": _letter,
    "form": _form,
    "table": _table,
    "column": _columns,
    "stamp-round": _round_stamp,
    "stamp-box": _box_stamp,
    "receipt": _receipt,
    "cover": _cover,
    "list": _list,
}
