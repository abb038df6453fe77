"""Resizes and crops a decoded picture to a square of RGB bytes, by the rule of a tower."""

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.formats import Reading
from llama_adapter.vision.pixels import CLIP_PIXELS, PixelRule, Resample
from llama_adapter.vision.squares import cut

# Up to this ratio of long to short side, the whole picture is resized and then cropped, as CLIP does. Beyond it, the
# resized picture would be very large, and most of it would be cropped away: 1 x 60,000 pixels become 224 x 13,440,000.
MAX_ASPECT_RESIZED_WHOLE: Final = 64

# Filters, and pixels of a picture, or of the result if that is smaller, that they reach to.
_FILTERS: Final[dict[Resample, tuple[Image.Resampling, int]]] = {
    "bicubic": (Image.Resampling.BICUBIC, 2),
    "bilinear": (Image.Resampling.BILINEAR, 1),
    "lanczos": (Image.Resampling.LANCZOS, 3),
}

FLOAT_RANGES: Final = "0 to 1, or 0 to 255 with a largest value of at least 2"

# Modes that Pillow cannot resize, or resizes differently from common modes -> the equivalent common mode.
_COMMON_MODE: Final = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}


def preprocess(
    image: Image.Image,
    *,
    name: str = "the given picture",
    rule: PixelRule = CLIP_PIXELS,
    convert: Literal["last", "first"] = "last",
    reading: Reading = "exact",
) -> NDArray[np.uint8]:
    """Resize, crop and convert to RGB by `rule`: uint8 (S, S, 3), 0..255, contiguous. S is the rule's `image_size`.

    With `rule.longest`, the result is a sheet of squares, see `squares.py`.

    By default, the result is the same as that of CLIP's transform with the installed Pillow: bicubic, antialiased, in
    the picture's own mode, with conversion last. Alpha affects the resampling and is then dropped. Palette and 1-bit
    pictures are resampled with nearest neighbour. Pillow 13 changed the order of passes for some tall pictures, so
    results of different versions may differ in rounding.

    There are two differences from CLIP, and from the image processors that other rules follow:

    - Values of more than 8 bits are scaled, while Pillow clips them at 255. 16-bit values keep their high byte. 32-bit
      integers are treated as 8 bits if all fit, else as 16 bits; floats as in `float_levels`.
    - If the ratio of sides exceeds 64, only the neighbourhood of the centre is resampled, which may alter rounding.

    `convert="first"` converts to RGB before resizing by any rule, as programs with OpenCV do. The released adapters
    were trained this way. The result differs for pictures with alpha, a palette or 1 bit.

    `reading="fast"` resamples grey and RGB pictures with torch. Few values differ, by one level, or by more in noisy
    tall pictures. Other modes, and pictures that need no resampling, are the same as with "exact".

    Raises `PictureError`: unsupported for values outside these ranges or a mode that cannot become RGB, too_large if
    memory runs out, truncated if `image` is not decoded yet and decoding fails. `name` is used in messages.
    """
    try:
        image.load()
    except Exception as error:
        raise PictureError("truncated", f"Wanted a decoded picture, but decoding {name} fails: {error}") from error
    try:
        common = _in_common_mode(image, name=name)
        plain = common.convert("RGB") if convert == "first" or rule.rgb_first else common
        cropped = _resize_and_crop(plain, rule=rule, reading=reading)
        return np.array(cropped.convert("RGB"), dtype=np.uint8, order="C")
    except PictureError:
        raise
    except MemoryError:
        raise PictureError(
            "too_large",
            f"There is not enough memory to resize the {image.width} x {image.height} pixels of {name}; "
            "make it smaller.",
        ) from None
    except Exception as error:
        raise PictureError(
            "unsupported",
            f"Wanted a picture that converts to RGB, but {name} has Pillow's mode {image.mode} and size "
            f"{image.width} x {image.height} ({error}); convert it to 8-bit RGB.",
        ) from error


def _resize_and_crop(image: Image.Image, *, rule: PixelRule, reading: Reading) -> Image.Image:
    (width, height), size = image.size, rule.image_size
    if rule.longest:
        return cut(image, rule=rule, resample=_FILTERS[rule.resample][0])
    if rule.is_squashed:
        return _resize(image, (size, size), rule=rule, reading=reading)
    short, long = sorted((width, height))
    if long > short * MAX_ASPECT_RESIZED_WHOLE:
        return _resample_centre(image, rule=rule)
    resized = size + rule.margin
    if short != resized:
        resized_long = resized * long // short
        new_size = (resized, resized_long) if width < height else (resized_long, resized)
        image = _resize(image, new_size, rule=rule, reading=reading)
    left, top = _crop_offset(image.width, rule=rule), _crop_offset(image.height, rule=rule)
    return image.crop((left, top, left + size, top + size))


def _resize(image: Image.Image, size: tuple[int, int], *, rule: PixelRule, reading: Reading) -> Image.Image:
    """Resize to `size`, (width, height). Pillow resizes all modes other than grey and RGB, and with Lanczos."""
    if reading == "exact" or image.mode not in ("L", "RGB") or rule.resample == "lanczos":
        return image.resize(size, _FILTERS[rule.resample][0])
    import torch  # imported here, because exact reading needs no torch
    from torch.nn.functional import interpolate

    width, height = size
    pixels_HWC = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)
    resized_1CHW = interpolate(pixels_HWC.permute(2, 0, 1)[None], (height, width), mode=rule.resample, antialias=True)
    resized_HWC = resized_1CHW[0].permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(resized_HWC[..., 0] if image.mode == "L" else resized_HWC)


def _crop_offset(length: int, *, rule: PixelRule) -> int:
    cut = length - rule.image_size
    return cut // 2 if rule.rgb_first else round(cut / 2)  # `round` rounds halves to the even number


def _resample_centre(image: Image.Image, *, rule: PixelRule) -> Image.Image:
    """The result of resizing and cropping, without computing the pixels that would be cropped away."""
    (resample, radius), size = _FILTERS[rule.resample], rule.image_size
    short, long = sorted(image.size)
    resized_long = (size + rule.margin) * long // short
    scale = long / resized_long  # source pixels per pixel of the result
    start = _crop_offset(resized_long, rule=rule) * scale
    stop = start + size * scale
    # The short side is cropped by the margin.
    before = _crop_offset(size + rule.margin, rule=rule)
    near, far = (part * short / (size + rule.margin) for part in (before, rule.margin - before))
    # Crop to whole pixels first, because Pillow stores a box in single precision, which is too coarse a million pixels
    # from the edge.
    reach = int(radius * max(scale, 1.0)) + 2  # reach of the filter, so that the new edges have no effect
    first, last = max(0, int(start) - reach), min(long, int(stop) + reach)
    if image.width < image.height:
        image = image.crop((0, first, image.width, last))
        box = (near, start - first, image.width - far, stop - first)
    else:
        image = image.crop((first, 0, last, image.height))
        box = (start - first, near, stop - first, image.height - far)
    return image.resize((size, size), resample, box=box)


def _in_common_mode(image: Image.Image, *, name: str) -> Image.Image:
    """The picture in a mode that CLIP's transform handles, with at most 8 bits per value."""
    mode = image.mode
    if mode in _COMMON_MODE:
        return image.convert(_COMMON_MODE[mode])
    if mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if mode == "I":
        return Image.fromarray(_integers_to_8_bit(np.asarray(image), name=name))
    if mode == "F":
        values = np.asarray(image)
        if (levels := float_levels(values)) is None:
            raise _out_of_range(f"{values.min():g} to {values.max():g}", wanted=FLOAT_RANGES, name=name)
        return Image.fromarray(levels)
    return image


def _integers_to_8_bit(values: NDArray[np.int32], *, name: str) -> NDArray[np.uint8]:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise _out_of_range(f"{low} to {high}", wanted="0 to 255 or 0 to 65535", name=name)
    return (values if high <= 255 else values >> 8).astype(np.uint8)


@np.errstate(all="ignore")
def float_levels(values: NDArray[np.floating[Any]]) -> NDArray[np.uint8] | None:
    """Floats in one of FLOAT_RANGES, rounded to whole levels; None for others.

    Rounding errors are in the range, as 1.0000001 after undoing a normalisation. With a largest value of 1.1, the range
    is not known: an enlarged picture of 0 to 1 may have it, and as 0 to 255 it would be black.
    """
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    scale = 255 if high * 255 < 255.4 else 1  # what rounds to 255 belongs to it
    if not (low * scale > -0.4 and (scale == 255 or 2 <= high < 255.4)):  # written so that NaN is refused too
        return None
    return np.rint(values.astype(np.float32) * scale).astype(np.uint8)


def _out_of_range(came: str, *, wanted: str, name: str) -> PictureError:
    return PictureError(
        "unsupported", f"Wanted grey values of {wanted}, but {name} has {came}; scale it to 8 bits first."
    )
