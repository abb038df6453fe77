"""A view is small, upright and in colour for every mode of the picture."""

import numpy as np
import pytest
from PIL import Image

from llama_adapter.app.pictures.reading.reader import PictureReader
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.app.pictures.reading.views import view_pixels
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.pixels import CLIP_PIXELS
from tests.odd_pictures.samples import saved

SIDE = 160


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "I", "F", "CMYK"])
def test_a_view_is_small_whatever_the_mode(mode: str) -> None:
    kind = "TIFF" if mode in ("CMYK", "I", "F") else "PNG"
    image = load_picture(saved(Image.new(mode, (900, 300)), kind)).image

    pixels = view_pixels(image, side=SIDE)

    assert (pixels.shape, pixels.dtype) == ((53, SIDE, 3), np.uint8)


def test_small_deep_odd_and_transparent_pictures() -> None:
    assert view_pixels(Image.new("RGB", (20, 10)), side=SIDE).shape == (10, 20, 3)  # it is not enlarged
    levels = np.linspace(30_000, 30_200, 64 * 64, dtype=np.uint16).reshape(64, 64)
    deep = view_pixels(Image.fromarray(levels), side=SIDE)
    assert (deep.min(), deep.max()) == (0, 255)  # stretched to the range of values in the picture
    odd = np.array([[np.nan, 0.0], [1.0, 2.0]], dtype=np.float32)
    assert view_pixels(Image.fromarray(odd), side=SIDE).shape == (2, 2, 3)


def test_a_reader_gives_views_upright_with_the_size_of_the_whole_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = saved(Image.new("RGB", (1200, 800)), "JPEG", exif=exif)

    reading = PictureReader(ReadingSpec(exif="ignore"), pixels=CLIP_PIXELS).read(picture, side=SIDE)

    assert reading.pixels.shape == (160, 107, 3)
    assert (reading.width, reading.height) == (800, 1200)


def test_a_view_of_a_transparent_picture_is_on_white() -> None:
    picture = saved(Image.new("RGBA", (4, 4)), "PNG")

    for transparency in ("white", "ignore"):  # as viewers show it, whatever the model sees
        reading = PictureReader(ReadingSpec(transparency=transparency), pixels=CLIP_PIXELS).read(picture, side=SIDE)
        assert (reading.pixels == 255).all()


def test_a_view_has_the_limits_of_the_reader() -> None:
    picture = saved(Image.new("RGB", (100, 100)), "PNG")
    for spec in (ReadingSpec(max_pixels=9_999), ReadingSpec(max_bytes=10)):
        reading = PictureReader(spec, pixels=CLIP_PIXELS).read(picture, side=SIDE)
        assert reading.pixels is None
        assert reading.error.code == "too_large"
