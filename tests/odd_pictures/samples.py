"""The description of an odd picture, and the small valid pictures from which odd ones are made."""

import io
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from PIL import Image

Expected = Literal["readable", "error", "either"]


@dataclass(frozen=True, slots=True)
class OddPicture:
    """A path, and what a reader should give for it; `either` if that depends on the decoder."""

    path: str  # with surrogates if the name is not UTF-8
    expected: Expected
    why: str


@dataclass(frozen=True, slots=True)
class OddFile:
    """An odd picture before it is written."""

    name: str
    content: bytes
    expected: Expected
    why: str


def scene(mode: str = "RGB", *, width: int = 96, height: int = 64) -> Image.Image:
    """Gradients and edges, so that a decoder cannot skip anything unnoticed.

    Each call makes a new one, as saving changes it.
    """
    down, right = np.mgrid[0:height, 0:width]
    red = right * 255 // max(1, width - 1)
    green = down * 255 // max(1, height - 1)
    blue = ((right // 8 + down // 8) % 2) * 255
    image = Image.fromarray(np.stack([red, green, blue], axis=-1).astype(np.uint8))
    if mode in ("RGBA", "LA", "PA"):
        image.putalpha(Image.fromarray((255 - red).astype(np.uint8)))
    return image.convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The picture as the bytes of a file."""
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


@cache
def sound_files() -> dict[str, bytes]:
    """One file of each format, by its suffix."""
    return {
        "jpg": saved(scene(), "JPEG", quality=80),
        "png": saved(scene(), "PNG"),
        "gif": saved(scene("P"), "GIF"),
        "webp": saved(scene(), "WEBP"),
        "bmp": saved(scene(), "BMP"),
        "tif": saved(scene(), "TIFF", compression="tiff_lzw"),
    }
