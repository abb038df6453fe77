"""Cuts pictures into squares of one size, with the whole picture as the last one, as Idefics3 and SmolVLM do.

The squares of one picture are in a sheet: the grid, and below it on the left the whole picture. The shape of the sheet
tells the grid, so that a sheet passes through everything that other pixels pass through.
"""

# H x W x C pixels, S side of a square

import math

import numpy as np
from PIL import Image

from llama_adapter.vision.pixels import PixelRule


def cut(image: Image.Image, *, rule: PixelRule, resample: Image.Resampling) -> Image.Image:
    """The sheet of an RGB picture, by the rules of transformers' Idefics3ImageProcessor.

    The long side is resized to `rule.longest`, also upwards, then both sides to multiples of the squares' side. With
    `rule.is_squashed`, there is only the whole picture.
    """
    side = rule.image_size
    image = image.resize(_scaled(*image.size, longest=rule.longest), resample)
    if not rule.is_squashed:
        image = image.resize(_in_squares(*image.size, side=side), resample)
    if image.size == (side, side):
        return image
    whole = image.resize((side, side), resample)
    if rule.is_squashed:
        return whole
    sheet = Image.new("RGB", (image.width, image.height + side))
    sheet.paste(image)
    sheet.paste(whole, (0, image.height))
    return sheet


def grid_of(sheet_HWC: np.ndarray, *, side: int) -> tuple[int, int]:
    """Rows and columns of the squares of a sheet; (0, 0) if it has only the whole picture."""
    height, width = sheet_HWC.shape[:2]
    return (0, 0) if height == side else (height // side - 1, width // side)


def squares_of(sheet_HWC: np.ndarray, *, side: int) -> list[np.ndarray]:
    """The squares (S, S, 3) of a sheet, row by row, and at last the whole picture."""
    rows, columns = grid_of(sheet_HWC, side=side)
    corners = [*((row, column) for row in range(rows) for column in range(columns)), (rows, 0)]
    return [sheet_HWC[row * side : (row + 1) * side, col * side : (col + 1) * side] for row, col in corners]


def _scaled(width: int, height: int, *, longest: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        return longest, max(1, _even(int(longest / ratio)))
    return max(1, _even(int(longest * ratio))), longest


def _in_squares(width: int, height: int, *, side: int) -> tuple[int, int]:
    def up(length: int) -> int:
        return max(1, math.ceil(length / side)) * side

    ratio = width / height
    if width >= height:
        return up(width), up(int(up(width) / ratio))
    return up(int(up(height) * ratio)), up(height)


def _even(length: int) -> int:
    return length + length % 2
