"""Decodes a path, bytes or a PIL image into a picture with its digest, or raises `PictureError`. No resizing."""

import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import BytesIO
from typing import Any, Final, TypeVar, get_args

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.containers import JPEG_END, bare_picture, completed_jpegs, picture_start
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.files import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_PIXELS,
    check_bytes,
    out_of_memory,
    read_picture_file,
)
from llama_adapter.vision.formats import PICTURE_FORMATS, Damaged, Orientation, PictureNote, Transparency
from llama_adapter.vision.not_read import archive_kind, begins_like, is_heic, other_file, page_kind, rare_kind

Result = TypeVar("Result")
PictureSource = str | os.PathLike[str] | os.PathLike[bytes] | bytes | Image.Image


# Pillow warns about unusual metadata and large pictures, which are either harmless or refused below.
# `warnings.catch_warnings` changes the state of the whole process and is not thread-safe; a filter is.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, module=r"PIL\.")

_TURN_UPRIGHT: Final = {  # by the EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAP_SIDES: Final = (5, 6, 7, 8)  # EXIF orientations that turn by a quarter
_Tag = ExifTags.Base
_OF_MANY_KINDS: Final = ("BMP", "TIFF")  # formats with kinds that Pillow does not decode, such as floats in colour
_READ_HERE: Final = "JPEG, PNG, WebP, GIF, BMP, TIFF, PPM and AVIF are"
# Modules of Pillow that register the formats of `PICTURE_FORMATS`.
_PLUGINS: Final = ("Avif", "Bmp", "Gif", "Jpeg", "Png", "Ppm", "Tiff", "WebP")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPicture:
    """A decoded picture in the colour mode of its file."""

    image: Image.Image
    name: str  # name in messages, in backticks if it is a file's name
    digest: str  # SHA-256 in hexadecimal: of the file's bytes; for a PIL image, of mode, size, palette and pixels
    width: int  # of the whole picture in pixels, after orientation; `image` may be smaller with `least_side`
    height: int
    notes: tuple[PictureNote, ...] = ()


def load_picture(
    source: PictureSource,
    *,
    name: str | None = None,
    orientation: Orientation = "upright",
    transparency: Transparency = "white",
    damaged: Damaged = "refuse",
    max_pixels: int = DEFAULT_MAX_PIXELS,
    max_bytes: int = DEFAULT_MAX_BYTES,
    least_side: int | None = None,
    digest: str | None = None,
) -> LoadedPicture:
    """Read and decode one picture. For an animation, this is the first frame.

    Parameters:
        source: a path, the bytes of a file, or a PIL image.
        name: the name in messages, for bytes and PIL images.
        orientation: "upright" applies the EXIF orientation. "ignore" returns the pixels as Pillow does, which is CLIP's
            rule (Pillow itself turns TIFF files upright).
        transparency: "white" puts a transparent picture on white, as viewers do. "ignore" keeps the colours stored for
            transparent pixels, which is CLIP's rule.
        damaged: "refuse" raises if pixels are damaged. "answer" returns what can be decoded, and black for the rest (of
            a TIFF of 16 bits whose zero is white, white).
        max_pixels: checked in the header before decoding. Pillow's own limit, 2 * `PIL.Image.MAX_IMAGE_PIXELS` (about
            179 million), applies as well.
        max_bytes: compared with the size on disk before reading.
        least_side: if given, in pixels, a grey or RGB JPEG may be decoded at a half, a quarter or an eighth of its size
            as long as both sides have at least this length. This is several times faster, with slightly different
            values.
        digest: the SHA-256 of the given bytes, if it is known.

    Raises `PictureError`, and no other error, for all faults of the picture, and ValueError for an unknown
    `orientation`.
    """
    if orientation not in get_args(Orientation):
        raise ValueError(f"orientation must be upright or ignore, got {orientation!r}")
    answers = damaged == "answer"
    if isinstance(source, Image.Image):
        name = "the given PIL image" if name is None else f"`{shown_name(name)}`"
        _check_pixels(source.size, name=name, max_pixels=max_pixels)
        file = getattr(source, "fp", None)
        # Tiles come second: another thread may have decoded it meanwhile, which ends them and then the file.
        if (file is None or getattr(file, "closed", False)) and getattr(source, "tile", None):
            raise PictureError("unreadable", f"The file of {name} was closed before its pixels were read: load it.")
        image, is_damaged = _decoded(source, name=name, answers=answers)
        width, height = image.size
        digest = _guarded(lambda: _digest_of_pixels(image), name=name)
    else:
        if isinstance(source, bytes):
            name = "the given bytes" if name is None else f"`{shown_name(name)}`"
            data = source
            check_bytes(len(data), name=name, max_bytes=max_bytes)
        else:
            data = read_picture_file(source, max_bytes=max_bytes)
            name = f"`{shown_name(os.fspath(source))}`"
        if not data:
            raise PictureError("empty", f"Wanted a picture, got zero bytes from {name}; save or copy it again.")
        digest = digest or hashlib.sha256(data).hexdigest()
        try:
            image, (width, height), is_damaged = _load(
                data, name=name, max_pixels=max_pixels, least_side=least_side, answers=answers
            )
        except PictureError as error:
            error.digest = digest
            raise
    tag = _orientation_tag(image) if orientation == "upright" else 1
    notes: list[PictureNote] = ["damaged"] if is_damaged else []
    try:
        if (on_white := _guarded(lambda: _on_white(image), name=name)) is not None:
            notes.append("transparent")
            image = on_white if transparency == "white" else image
        if (method := _TURN_UPRIGHT.get(tag)) is not None:
            image = _guarded(lambda: image.transpose(method), name=name)
    except PictureError as error:
        error.digest = digest
        raise
    if tag in _SWAP_SIDES:
        width, height = height, width
    return LoadedPicture(image=image, name=name, digest=digest, width=width, height=height, notes=tuple(notes))


def _load(data: bytes, *, answers: bool, **options: Any) -> tuple[Image.Image, tuple[int, int], bool]:
    """As `_read`, but for the file as it is: with other bytes around its pixels. Raises `PictureError`."""
    content, fault = bare_picture(data)
    try:
        if fault and not answers:
            raise _damaged(fault, name=options["name"])
        image, size, _ = _read(content, **options)
        return image, size, bool(fault)
    except PictureError as error:
        if error.code == "not_a_picture" and not archive_kind(data) and (start := picture_start(data)):
            return _load(data[start:], answers=answers, **options)
        if error.code == "truncated":
            with suppress(PictureError):
                whole = [_read(end, **options | {"least_side": None}) for end in completed_jpegs(content)]
                are_equal = _guarded(lambda: whole[:1] == whole[-1:], name=options["name"])
                if whole and are_equal:
                    return whole[0]
            for part in (content, content + JPEG_END) if answers else ():
                with suppress(PictureError):
                    return *_read(part, answers=True, **options)[:2], True
        raise


def _read(
    data: bytes, *, name: str, max_pixels: int, least_side: int | None, answers: bool = False
) -> tuple[Image.Image, tuple[int, int], bool]:
    """The decoded picture, the size of the whole one, and whether its pixels are damaged. Raises `PictureError`."""
    image = _open(data, name=name)
    size = image.size
    _check_pixels(size, name=name, max_pixels=max_pixels)
    if least_side is not None:
        _guarded(lambda: _ask_for_less(image, least_side=least_side), name=name)
    image, is_damaged = _decoded(image, name=name, data=data, answers=answers)
    return image, size, is_damaged


def _check_pixels(size: tuple[int, int], *, name: str, max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise PictureError("unsupported", f"Wanted at least one pixel, but {name} is {width} x {height}.")
    if width * height > max_pixels:
        raise PictureError(
            "too_large",
            f"Wanted at most {max_pixels:,} pixels, but {name} is {width} x {height} = {width * height:,}; "
            "make it smaller or raise the limit.",
        )


@cache
def _available_formats() -> tuple[str, ...]:
    """Those of `PICTURE_FORMATS` that this build of Pillow has: it may lack AVIF or WebP."""
    # `Image.init` imports the modules of all formats, which costs every process that reads pictures 20 ms more.
    for name in _PLUGINS:
        with suppress(ImportError):
            import_module(f"PIL.{name}ImagePlugin")
    return tuple(name for name in PICTURE_FORMATS if name in Image.OPEN)


@cache
def _reads_heic() -> bool:
    """Whether the extra `heif` is installed. Its decoder is registered on the first call."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    pillow_heif.options.DECODE_THREADS = 1  # pictures are already read in parallel
    return True


def _open(data: bytes, *, name: str) -> Image.Image:
    """Read the header. Raises `PictureError`."""
    formats = _available_formats()
    if is_heic(data) and _reads_heic():
        formats += ("HEIF",)
    try:
        image = Image.open(BytesIO(data), formats=formats)
        if image.format == "PNG" and (clear := image.info.get("transparency")) is not None:
            depth = data[24]  # Pillow scales the pixels to 8 bits, but not their transparent colour
            if image.mode == "L":
                image.info["transparency"] = clear * 255 // (2**depth - 1)
            elif image.mode == "RGB" and depth == 16:
                image.info["transparency"] = tuple(value >> 8 for value in clear)
        return image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(
            "too_large", f"Wanted a picture of fewer pixels; {name} is refused by Pillow: {error}"
        ) from None
    except MemoryError:
        raise out_of_memory(name) from None
    except Exception as error:
        raise _why_not_opened(data, name=name, error=error) from error


def _ask_for_less(image: Image.Image, *, least_side: int) -> None:
    """Let the decoder of a JPEG decode it at a smaller size, without its highest frequencies."""
    if image.format == "JPEG" and image.mode in ("L", "RGB"):
        image.draft(image.mode, (least_side, least_side))


def _decoded(image: Image.Image, *, name: str, data: bytes = b"", answers: bool = False) -> tuple[Image.Image, bool]:
    """The decoded picture, and whether it is damaged: with `answers`, what cannot be decoded has the value 0.

    `data` is the file's content, if a failure may mean that Pillow cannot decode this kind of picture.
    """
    try:
        _guarded(image.load, name=name, data=data)
    except PictureError as error:
        tags = getattr(image, "tag_v2", {})
        # Pillow takes YCbCr that is not in a JPEG for other colours, and fails later.
        has_wrong_colours = tags.get(_Tag.PhotometricInterpretation) == 6 and tags.get(_Tag.Compression) != 7
        if not answers or error.code != "truncated" or has_wrong_colours:
            raise
        image.tile = []  # type: ignore[attr-defined]  # without tiles, Pillow keeps the rows that it has
        with suppress(Exception):
            image.load()
            if image.getbbox(alpha_only=False):
                return _full_range(image), True
        raise
    return _guarded(lambda: _full_range(image), name=name), False


def _full_range(image: Image.Image) -> Image.Image:
    """A TIFF's grey values of 12 or 16 bits as 16 bits from black to white; Pillow returns what is stored."""
    tags = getattr(image, "tag_v2", {}) if image.mode == "I;16" else {}
    if tags.get(_Tag.PhotometricInterpretation) == 0:
        return Image.fromarray(65535 - np.asarray(image))
    return Image.fromarray(np.asarray(image) << 4) if tags.get(_Tag.BitsPerSample) == (12,) else image


def _on_white(image: Image.Image) -> Image.Image | None:
    """The picture on white; None if no pixel is transparent."""
    if not image.has_transparency_data:
        return None
    if image.mode.startswith("I;16"):
        values, clear = np.asarray(image), image.info["transparency"]
        return Image.fromarray(np.where(values == clear, np.uint16(65535), values)) if (values == clear).any() else None
    is_grey = image.mode in ("1", "L", "LA", "La")
    layer = image.convert("LA" if is_grey else "RGBA")
    alpha = layer.getchannel("A")
    low, high = alpha.getextrema()
    if low == 255 or (high == 0 and image.format == "BMP"):  # a BMP has zeros in a channel that is not used
        return None
    ground = Image.new("L" if is_grey else "RGB", image.size, "white")
    ground.paste(layer.convert(ground.mode), mask=alpha)
    return ground


def _guarded(step: Callable[[], Result], *, name: str, data: bytes = b"") -> Result:
    """Run one step on an opened picture. Pillow's decoders raise errors of many classes; all are faults of the picture.

    `data` is the file's content, if a failure may mean that Pillow cannot decode this kind of picture.
    """
    try:
        return step()
    except MemoryError:
        raise out_of_memory(name) from None
    except Image.DecompressionBombError as error:
        raise PictureError("too_large", f"Wanted a picture of fewer pixels; {name} is refused: {error}") from None
    except Exception as error:
        raise _not_decoded(data, name=name, fault=_in_words(error)) from error


def _not_decoded(data: bytes, *, name: str, fault: str) -> PictureError:
    if kind := rare_kind(data):
        return PictureError("unsupported", f"{name} is {kind}, which is not read; convert it to an 8-bit JPEG or PNG.")
    if (started_as := begins_like(data)) in _OF_MANY_KINDS:
        return PictureError(
            "truncated",
            f"Wanted a whole picture, but {name} is cut off, damaged or a rare kind of {started_as} "
            f"({fault}); save or copy it again, or convert it to an 8-bit PNG.",
        )
    return _damaged(fault, name=name)


def _damaged(fault: str, *, name: str) -> PictureError:
    return PictureError(
        "truncated", f"Wanted a whole picture, but {name} is cut off or damaged ({fault}); save or copy it again."
    )


def _in_words(error: Exception) -> str:
    """The decoder's message on one line of limited length, because it may quote bytes of the file."""
    words = " ".join(str(error).split()) or type(error).__name__
    words = words.encode(errors="backslashreplace").decode()
    return words if len(words) <= 120 else words[:117] + "..."


def _orientation_tag(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8.

    It is 1 if the metadata is missing or damaged, because the pixels are usable without it.
    """
    try:
        tag = image.getexif().get(_Tag.Orientation)
    except Exception:
        return 1
    return tag if isinstance(tag, int) else 1


def _digest_of_pixels(image: Image.Image) -> str:
    header = f"{image.mode} {image.width}x{image.height} orientation {_orientation_tag(image)}\n"
    clear = image.info.get("transparency")
    digest = hashlib.sha256((header if clear is None else f"{header}transparent {clear}\n").encode())
    digest.update(bytes(image.getpalette() or ()))
    digest.update(image.tobytes())
    return digest.hexdigest()


def _why_not_opened(data: bytes, *, name: str, error: Exception) -> PictureError:
    if is_heic(data) and not _reads_heic():
        return PictureError(
            "unsupported",
            f"{name} is a HEIC picture, which is read with the extra `heif` ({install_hint('heif')}); install it, or "
            "convert the picture to JPEG or PNG.",
        )
    if started_as := "HEIC" if is_heic(data) else begins_like(data):
        is_unknown = isinstance(error, UnidentifiedImageError)  # whose words name an object in memory
        fault = f"Pillow does not know its {started_as}" if is_unknown else _in_words(error)
        return _not_decoded(data, name=name, fault=fault)
    if kind := other_file(data):
        return PictureError(
            "unsupported", f"{name} is {kind}, which is not read ({_READ_HERE}); convert it to JPEG or PNG."
        )
    but, advice = page_kind(data) or ("is of no known format", "check the file")
    return PictureError("not_a_picture", f"Wanted a picture ({_READ_HERE} read), but {name} {but}; {advice}.")
