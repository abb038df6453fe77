"""A decoded picture -> 224 x 224 RGB bytes. The only place with pixel arithmetic on the host."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llama_adapter.vision.errors import PictureError

# Up to this ratio of long to short side the whole picture is resized and then cropped, as CLIP does. Beyond it the
# resized picture would be mostly thrown away, and enormous: 1 x 60,000 pixels become 224 x 13,440,000.
MAX_ASPECT_RESIZED_WHOLE: Final = 64

# Modes that Pillow's resize refuses or treats unlike CLIP's usual ones, and their everyday equivalents.
_EVERYDAY_MODE: Final = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}

Reading = Literal["exact", "fast"]


def preprocess(
    image: Image.Image,
    *,
    name: str = "the given picture",
    size: int = 224,
    convert: Literal["last", "first"] = "last",
    reading: Reading = "exact",
) -> NDArray[np.uint8]:
    """CLIP's transform up to the tensor: resize the shorter side to `size`, crop the centre, convert to RGB.

    Returns (size, size, 3) uint8, contiguous, R G B in 0..255; division and normalisation belong to the encoder.

    Equal to CLIP's own transform with the installed Pillow (bicubic, antialiased, resized and cropped in the picture's
    own mode, converted last): alpha weighs in the resampling and is then dropped, palette and 1-bit pictures are
    resampled with nearest neighbour. Pillow 13 changed the order of the two passes for some tall pictures, so another
    Pillow may give other last bits.

    `convert="first"` goes to RGB before resizing, as programs do that read with OpenCV: the released adapters were
    trained so. It differs for transparent, palette and 1-bit pictures: alpha is dropped at once and does not weigh in.

    `reading="fast"` resamples grey and RGB pictures by torch, in the same way and faster; values differ by a level here
    and there (noise in tall pictures, which Pillow 13 resamples in another order, by more). Everything else, and what
    needs no resampling, is as with "exact".

    Two departures, where CLIP's transform fails its user:

    - more than 8 bits per value are scaled, where Pillow clips at 255: 16 bits keep their high byte, as Pillow does
      for 16-bit RGB. 32-bit integers count as 8 bits if they fit, else as 16; floats as 0..1 if they fit, else 0..255
    - beyond a ratio of sides of 64, only the neighbourhood of the centre is resampled: the same picture, but rounding
      may differ (by a level or so; more where noise meets the changed order of passes)

    Raises `PictureError`: unsupported for values outside those ranges or a mode without a way to RGB, too_large when
    memory runs out, truncated if `image` was not decoded yet (`load_picture` decodes) and cannot be. Messages quote
    `name` unchanged; pass `LoadedPicture.name` for a loaded picture.
    """
    try:
        image.load()
    except Exception as error:
        raise PictureError("truncated", f"Wanted a decoded picture, but decoding {name} fails: {error}") from error
    try:
        everyday = _with_everyday_mode(image, name=name)
        plain = everyday.convert("RGB") if convert == "first" else everyday
        cropped = _resized_and_cropped(plain, size=size, resize=_RESIZE[reading])
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


def _resized_and_cropped(image: Image.Image, *, size: int, resize: "Resize") -> Image.Image:
    width, height = image.size
    short, long = sorted((width, height))
    if long > short * MAX_ASPECT_RESIZED_WHOLE:
        return _resampled_centre(image, size=size)
    if short != size:
        resized_long = size * long // short
        new_size = (size, resized_long) if width < height else (resized_long, size)
        image = resize(image, new_size)
    left, top = _crop_offset(image.width, size=size), _crop_offset(image.height, size=size)
    return image.crop((left, top, left + size, top + size))


def _resized_by_pillow(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image.resize(size, Image.Resampling.BICUBIC)


def _resized_by_torch(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """`size` is (width, height). In modes without alpha or palette both resample alike, in whole numbers."""
    if image.mode not in ("L", "RGB"):
        return _resized_by_pillow(image, size)
    import torch  # here, since reading exactly does without
    from torch.nn.functional import interpolate

    width, height = size
    pixels_HWC = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)
    resized_1CHW = interpolate(pixels_HWC.permute(2, 0, 1)[None], (height, width), mode="bicubic", antialias=True)
    resized_HWC = resized_1CHW[0].permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(resized_HWC[..., 0] if image.mode == "L" else resized_HWC)


Resize = Callable[[Image.Image, tuple[int, int]], Image.Image]
_RESIZE: Final[Mapping[Reading, Resize]] = {"exact": _resized_by_pillow, "fast": _resized_by_torch}


def _crop_offset(length: int, *, size: int) -> int:
    return round((length - size) / 2)  # halves to the even number, as CLIP's crop


def _resampled_centre(image: Image.Image, *, size: int) -> Image.Image:
    """What resizing and cropping would leave, without making the rest."""
    short, long = sorted(image.size)
    resized_long = size * long // short
    scale = long / resized_long  # source pixels per pixel of the result
    start = _crop_offset(resized_long, size=size) * scale
    stop = start + size * scale
    # Cut to whole pixels first: Pillow keeps a box in single precision, too coarse a million pixels from the edge.
    reach = int(2 * max(scale, 1.0)) + 2  # the bicubic kernel's, so that the cut edges have no influence
    first, last = max(0, int(start) - reach), min(long, int(stop) + reach)
    if image.width < image.height:
        image = image.crop((0, first, image.width, last))
        box = (0.0, start - first, float(image.width), stop - first)
    else:
        image = image.crop((first, 0, last, image.height))
        box = (start - first, 0.0, stop - first, float(image.height))
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _with_everyday_mode(image: Image.Image, *, name: str) -> Image.Image:
    """The picture in a mode that CLIP's transform handles; at most 8 bits per value."""
    mode = image.mode
    if mode in _EVERYDAY_MODE:
        return image.convert(_EVERYDAY_MODE[mode])
    if mode.startswith("I;16"):
        return Image.fromarray(_high_byte(np.asarray(image)))
    if mode == "I":
        return Image.fromarray(_integers_to_8_bit(np.asarray(image), name=name))
    if mode == "F":
        return Image.fromarray(_floats_to_8_bit(np.asarray(image), name=name))
    return image


def _high_byte(values: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
    return (values >> 8).astype(np.uint8)


def _integers_to_8_bit(values: NDArray[np.int32], *, name: str) -> NDArray[np.uint8]:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise _out_of_range(f"{low} to {high}", wanted="0 to 255 or 0 to 65535", name=name)
    return values.astype(np.uint8) if high <= 255 else _high_byte(values)


def _floats_to_8_bit(values: NDArray[np.float32], *, name: str) -> NDArray[np.uint8]:
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):  # written so that NaN is refused too
        raise _out_of_range(f"{low:g} to {high:g}", wanted="0 to 1 or 0 to 255", name=name)
    return np.rint(values * 255 if high <= 1 else values).astype(np.uint8)


def _out_of_range(came: str, *, wanted: str, name: str) -> PictureError:
    return PictureError(
        "unsupported", f"Wanted grey values of {wanted}, but {name} has {came}; scale it to 8 bits first."
    )
