"""Resizing and cropping: CLIP's pixels for every picture that CLIP can read, and sensible ones for others."""

import itertools
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import MAX_ASPECT_RESIZED_WHOLE, float_levels, preprocess

GOLDEN = Path(__file__).parents[1] / "golden"
PICTURES = sorted(path.name for path in (GOLDEN / "images").iterdir())


def noise(width: int, height: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def smooth(width: int, height: int) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [255 * rows / height, 255 * columns / width, 127 + 127 * np.sin(8 * (rows / height + columns / width))]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def clip_transform(image: Image.Image, size: int = 224) -> NDArray[np.uint8]:
    """CLIP's Resize, CenterCrop and RGB conversion, written from its description."""
    width, height = image.size
    if min(width, height) != size:
        new = (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
        image = image.resize(new, Image.Resampling.BICUBIC)
    left, top = round((image.width - size) / 2.0), round((image.height - size) / 2.0)
    return np.asarray(image.crop((left, top, left + size, top + size)).convert("RGB"))


def largest_difference(one: NDArray[Any], other: NDArray[Any]) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_equal_the_golden_ones(name: str) -> None:
    pixels = preprocess(load_picture(GOLDEN / "images" / name, orientation="ignore", transparency="ignore").image)
    expected = np.asarray(Image.open(GOLDEN / "preprocessed" / f"{Path(name).stem}.png").convert("RGB"))
    tolerance = 2 if name.endswith(".jpg") else 0  # JPEG decoders may differ by one or two levels
    assert largest_difference(pixels, expected) <= tolerance


def test_result_is_contiguous_rgb_bytes_of_its_own() -> None:
    image = Image.new("RGB", (224, 224), (10, 20, 30))
    pixels = preprocess(image)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (224, 224, 3)
    assert pixels.flags.c_contiguous
    assert tuple(pixels[100, 100]) == (10, 20, 30)
    pixels[:] = 0
    assert image.getpixel((100, 100)) == (10, 20, 30)


# Every size, and every mode with and without resizing.
@pytest.mark.parametrize(
    ("size", "mode"),
    [
        *((size, "RGB") for size in ((1, 1), (1, 60), (223, 224), (225, 224), (224, 700))),
        *itertools.product([(224, 225), (447, 225)], ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV"]),
    ],
)
def test_pixels_equal_clips_transform_in_every_mode(size: tuple[int, int], mode: str) -> None:
    image = noise(*size)
    if mode in ("RGBA", "LA"):
        image.putalpha(noise(*size, seed=1).convert("L"))
    image = image.quantize(16) if mode == "P" else image.convert(mode)
    assert np.array_equal(preprocess(image), clip_transform(image))


def test_pixels_equal_clips_transform_on_many_sizes() -> None:
    chance = np.random.default_rng(5)
    for _ in range(40):
        width, height = (int(side) for side in chance.integers(1, 700, 2))
        if max(width, height) <= min(width, height) * MAX_ASPECT_RESIZED_WHOLE:
            image = noise(width, height)
            assert np.array_equal(preprocess(image), clip_transform(image)), (width, height)
    for image, side in ((noise(90, 61), 32), (noise(7, 7 * MAX_ASPECT_RESIZED_WHOLE), 224)):
        assert np.array_equal(preprocess(image, rule=PixelRule(image_size=side)), clip_transform(image, side))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_transparent_palette_and_grey_pictures_keep_their_colours() -> None:
    palette = smooth(60, 60).quantize(8)
    grey = smooth(60, 60).convert("L")
    for image, transparency in ((palette, 3), (palette, bytes(range(8))), (grey, 7)):
        expected = preprocess(image)
        image = image.copy()
        image.info["transparency"] = transparency
        assert np.array_equal(preprocess(image), expected)


@pytest.mark.parametrize(("premultiplied", "plain"), [("RGBa", "RGBA"), ("La", "LA"), ("PA", "RGBA")])
def test_rare_modes_with_alpha_are_converted_to_common_ones(premultiplied: str, plain: str) -> None:
    image = smooth(50, 40).convert("L" if plain == "LA" else "RGB")
    image.putalpha(200)
    image = (smooth(50, 40).quantize(8) if premultiplied == "PA" else image).convert(premultiplied)
    assert np.array_equal(preprocess(image), clip_transform(image.convert(plain)))


# Fast reading


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(("width", "height"), [(900, 700), (480, 640), (225, 224), (100, 61)])
def test_reading_fast_differs_by_a_level_or_two(mode: str, width: int, height: int) -> None:
    for image in (smooth(width, height).convert(mode), noise(width, height).convert(mode)):
        fast, exact = preprocess(image, reading="fast"), preprocess(image)
        assert fast.shape == exact.shape
        assert largest_difference(fast, exact) <= 2
        assert (fast != exact).mean() < 0.01


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK", "I;16", "RGB"])
def test_reading_fast_is_exact_in_other_modes_without_resampling_and_for_strips(mode: str) -> None:
    for size in ((224, 224), (300, 224), (9000, 100), *([(400, 300)] if mode != "RGB" else [])):
        image = noise(*size).convert("L" if mode == "I;16" else "RGB").convert(mode)
        if mode in ("RGBA", "LA"):
            image.putalpha(noise(*size, seed=1).convert("L"))
        assert np.array_equal(preprocess(image, reading="fast"), preprocess(image))


# More than eight bits


def sixteen_bit_gradient() -> NDArray[np.uint16]:
    return np.broadcast_to(np.arange(224, dtype=np.uint16) * 290, (224, 224)).copy()


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_sixteen_bit_grey_keeps_its_high_byte(mode: str) -> None:
    values = sixteen_bit_gradient()
    if mode == "I":
        image = Image.fromarray(values.astype(np.int32))
    else:
        stored = values.astype(">u2") if mode == "I;16B" else values
        image = Image.frombytes(mode, (224, 224), stored.tobytes())
    assert image.mode == mode
    pixels = preprocess(image)
    assert np.array_equal(pixels, np.repeat((values >> 8)[..., None], 3, axis=-1))
    assert pixels.max() > 245


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bit_files_are_not_clipped_to_white(suffix: str, tmp_path: Path) -> None:
    values = sixteen_bit_gradient()
    path = tmp_path / f"grey.{suffix}"
    if suffix == "pgm":
        path.write_bytes(b"P5 224 224 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(path)
    assert np.array_equal(preprocess(load_picture(path).image)[:, :, 0], values >> 8)


@pytest.mark.parametrize("top", [1.0, 1.001, 2.0, 255.0])
def test_floats_are_fractions_or_levels_and_small_integers_are_levels(top: float) -> None:
    values = np.broadcast_to(np.linspace(0, top, 224, dtype=np.float32), (224, 224)).copy()
    pixels = preprocess(Image.fromarray(values))
    levels = np.broadcast_to(np.arange(224, dtype=np.int32), (224, 224)).copy()
    assert np.array_equal(preprocess(Image.fromarray(levels))[:, :, 1], levels)
    assert np.array_equal(pixels[:, :, 2], np.rint(values * (255 if top < 2 else 1)).astype(np.uint8))


@pytest.mark.parametrize(
    "values",
    [
        np.full((9, 9), -1, np.int32),
        np.full((9, 9), 70000, np.int32),
        np.full((9, 9), -0.5, np.float32),
        np.full((9, 9), 256.5, np.float32),
        np.full((9, 9), 1.1, np.float32),
        np.full((9, 9), 1.99, np.float32),
        np.linspace(-2.1, 2.6, 81, dtype=np.float32).reshape(9, 9),
        np.linspace(-100, 200, 81, dtype=np.float32).reshape(9, 9),
        np.full((9, 9), np.nan, np.float32),
        np.full((9, 9), np.inf, np.float32),
        np.full((9, 9), np.finfo(np.float32).min),
    ],
)
def test_values_without_a_known_range_are_unsupported(values: NDArray[Any]) -> None:
    assert code(Image.fromarray(values)) == "unsupported"


def test_levels_do_not_depend_on_numpys_error_state() -> None:
    with np.errstate(all="raise"):
        levels = float_levels(np.array([1e-300, 1.0]))
    assert levels is not None
    assert levels.tolist() == [0, 255]


def test_an_error_after_decoding_names_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "depths.tif"
    Image.fromarray(np.full((9, 9), -3, np.float32)).save(path)
    loaded = load_picture(path)
    with pytest.raises(PictureError, match=r"but `.*depths\.tif` has -3 to -3; scale it"):
        preprocess(loaded.image, name=loaded.name)
    with pytest.raises(PictureError, match=r"but `b\.tif` has"):
        preprocess(loaded.image, name=load_picture(path.read_bytes(), name="b.tif").name)


# Extreme shapes


@pytest.mark.parametrize("size", [(9, 9 * 64 + 1), (9 * 64 + 1, 9), (10, 2000), (228, 15000), (15000, 226)])
def test_pictures_beyond_the_ratio_are_the_same_up_to_rounding(size: tuple[int, int]) -> None:
    for image in (smooth(*size), smooth(*size).convert("L")):
        assert largest_difference(preprocess(image), clip_transform(image)) <= 2


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "1", "L", "I;16"])
@pytest.mark.parametrize("upright", [True, False])
def test_a_line_of_pixels_is_not_resized_whole(mode: str, upright: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    resize = Image.Image.resize

    def watched(image: Image.Image, size: tuple[int, int], *args: Any, **options: Any) -> Image.Image:
        nonlocal largest
        largest = max(largest, size[0] * size[1])
        return resize(image, size, *args, **options)

    monkeypatch.setattr(Image.Image, "resize", watched)
    length = 2_000_001
    image = Image.new(mode, (1, length) if upright else (length, 1))
    if mode == "P":
        image.putpalette([level for level in range(256) for _ in "RGB"])
    white: dict[str, Any] = {"RGB": (255,) * 3, "RGBA": (255,) * 4, "I;16": 65535}
    middle = (0, length // 2) if upright else (length // 2, 0)
    image.putpixel(middle, white.get(mode, 255))
    pixels = preprocess(image)
    assert largest == 224 * 224
    assert pixels[112, 112].min() > 200  # the only white pixel of the line fills the crop


# Failures


def code(image: Image.Image) -> str:
    """The code of the error."""
    with pytest.raises(PictureError) as caught:
        preprocess(image)
    return caught.value.code


def test_no_data_no_pixels_and_no_memory_are_picture_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (GOLDEN / "images" / "shapes_200x300.jpg").read_bytes()
    assert code(Image.open(BytesIO(data[:3000]))) == "truncated"
    assert code(Image.new("RGB", (0, 5))) == "unsupported"

    def exhaust(*args: Any, **options: Any) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", exhaust)
    assert code(noise(10, 10)) == "too_large"
