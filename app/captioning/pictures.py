"""Turns the values that users pass as pictures into one source per picture."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Union

import numpy as np
from PIL import Image

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs import InputSpec, read_inputs
from llama_adapter.app.pictures.inputs.data_uris import is_data_uri, read_data_uri
from llama_adapter.app.pictures.inputs.remote import RemotePicture
from llama_adapter.app.pictures.inputs.urls import AllowedHost, FetchError, PictureUrl
from llama_adapter.app.pictures.reading.reader import PictureReading, Reader
from llama_adapter.app.pictures.reading.sources import Source
from llama_adapter.runtime.errors import UsageError
from llama_adapter.vision.files import DEFAULT_MAX_BYTES
from llama_adapter.vision.image import PictureSource
from llama_adapter.vision.preprocess import FLOAT_RANGES, float_levels

if TYPE_CHECKING:  # jobs plan their work without torch
    from torch import Tensor

_ADDRESS = re.compile(r"https?://|data:", re.IGNORECASE)
_TAKEN = (
    "a path, folder, pattern, http(s) address or data URI, bytes, a binary file, a PIL image, or an array or tensor of "
    "pixels"
)


@dataclass(frozen=True, slots=True)
class GivenPicture:
    """One picture, and its name if it has one."""

    source: Source | PictureReading | RemotePicture
    name: str | None = None
    others: tuple[Source | PictureReading | RemotePicture, ...] = ()  # further pictures of the same prompt


# A path, pattern or address, the bytes of a file, an open file, an opened picture, or pixels.
PictureLike = Union[PictureSource, bytearray, memoryview, IO[bytes], np.ndarray, "Tensor", GivenPicture]
Pictures = PictureLike | Iterable[PictureLike]


def given_pictures(
    given: Pictures, *, allowed: tuple[AllowedHost, ...] = (), reader: Reader | None = None, first: int = 0
) -> list[GivenPicture]:
    """One or several pictures as a list, in order. Folders, patterns, archives and batches give several each.

    Open files are read from their beginning. A `reader` reads images of an iterable that is no sequence at once, as the
    next step may change or close them; messages count those without a name from `first`. Raises TypeError for anything
    that is not a picture, ValueError for arrays of another shape or range or with masked pixels and for closed files,
    and OSError of an open file.
    """
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "OUT":
        given = given.tolist()  # paths of a table
    is_one = is_one_picture(given) or isinstance(given, Mapping) or not isinstance(given, Iterable)
    at_once = None if is_one or isinstance(given, Sequence) else reader
    found: list[GivenPicture] = []
    for index, one in enumerate([given] if is_one else given):  # type: ignore[arg-type]
        advice = ": give several as a list" if isinstance(given, Mapping) else "" if is_one else f" at index {index}"
        for picture in _expanded(one, allowed=allowed, advice=advice):
            if at_once is not None:
                picture = read_image(picture, at_once, label=f"picture {first + len(found)}")
            found.append(picture)
    return found


def read_image(picture: GivenPicture, reader: Reader, *, label: str) -> GivenPicture:
    """A given image, read before it may change; other pictures unchanged. Messages call one without a name `label`."""
    if not isinstance(picture.source, Image.Image):
        return picture
    return replace(picture, source=reader.read(picture.source, name=picture.name or label))


def is_one_picture(given: object) -> bool:
    """Whether a value stands for a picture, or for several as one array, and is no collection of pictures."""
    kinds = (str, bytes, bytearray, memoryview, os.PathLike, Image.Image, np.ndarray)
    return isinstance(given, kinds) or hasattr(given, "read") or hasattr(given, "is_floating_point")


def _expanded(given: Any, *, allowed: tuple[AllowedHost, ...], advice: str) -> Iterator[GivenPicture]:
    match given:
        case GivenPicture():
            yield given
        case bytes() | Image.Image():
            yield GivenPicture(given)
        case bytearray() | memoryview():
            yield GivenPicture(bytes(given))
        case str() | os.PathLike():
            name = os.fsdecode(given)
            if isinstance(given, str) and _ADDRESS.match(name) and not os.path.lexists(name):
                yield GivenPicture(_at_address(name, allowed=allowed), None if is_data_uri(name) else name)
                return
            for found in read_inputs(InputSpec(paths=(name,))):
                assert found.source is not None, "a path names a picture"
                source = found.source if found.error is None else PictureReading(error=found.error)
                yield GivenPicture(source, found.label)
        case _ if hasattr(given, "is_floating_point"):  # a tensor
            try:
                on_cpu = given.detach().cpu()
                pixels = (on_cpu.float() if on_cpu.is_floating_point() else on_cpu).numpy()
            except (NotImplementedError, TypeError):  # it has no values, or not one for each pixel
                form = f"{given.layout} on {given.device}"
                raise TypeError(f"A tensor of pixels is dense, got {form}: call `to_dense()`, or load it") from None
            yield from _pictures_of_array(pixels)
        case np.ndarray():
            if np.ma.is_masked(given):
                raise ValueError("An array of pixels has masked pixels: fill them with a colour of the array's range")
            yield from _pictures_of_array(np.asarray(given))
        case _ if hasattr(given, "read"):
            # A file that is open for text has its bytes in `buffer`.
            file = given.buffer if hasattr(getattr(given, "buffer", None), "read") else given
            with suppress(AttributeError, OSError, ValueError):
                file.seek(0)  # it may have been read or written before; Pillow begins there too
            data = bytearray()
            while (part := file.read(DEFAULT_MAX_BYTES + 1 - len(data))) != b"":  # a pipe may give less than asked for
                if not isinstance(part, bytes):
                    raise TypeError(f"A picture's file must be open for reading bytes, this gave {type(part).__name__}")
                data += part
            own_name = getattr(given, "name", None)
            yield GivenPicture(bytes(data), own_name if isinstance(own_name, str) else None)
        case _:
            raise TypeError(f"A picture is {_TAKEN}, got {type(given).__name__}{advice}")


def _at_address(address: str, *, allowed: tuple[AllowedHost, ...]) -> bytes | RemotePicture | PictureReading:
    try:
        if is_data_uri(address):
            return read_data_uri(address, max_bytes=DEFAULT_MAX_BYTES)
        url = PictureUrl.parse(address)
    except FetchError as error:
        return PictureReading(error=AnswerError(code=error.code, message=error.message))
    if not any(host.matches(url) for host in allowed):
        message = f"Pictures of `{url.host}` are not fetched: name it in `allowed_hosts` of `Captioner.load`."
        return PictureReading(error=AnswerError(code="image_host_not_allowed", message=message))
    if find_spec("httpcore") is None:
        raise UsageError("Fetching pictures needs the package httpcore", hint="pip install httpcore anyio")
    return RemotePicture(url, allowed)


def _pictures_of_array(pixels: np.ndarray) -> Iterator[GivenPicture]:
    """Pixels of one picture, (H, W, 3), or of several, (B, H, W, 3); channels may come first, as (3, H, W).

    Pixels are RGB, or RGBA if they have 4 channels, as uint8 or as the floats of `float_levels`.
    """
    if pixels.dtype != np.uint8 and not np.issubdtype(pixels.dtype, np.floating):
        raise TypeError(f"An array of pixels has the type uint8 or a float, got {pixels.dtype}")
    shape = pixels.shape
    if pixels.ndim in (3, 4) and shape[-1] not in (3, 4) and shape[-3] in (3, 4):
        pixels = np.moveaxis(pixels, -3, -1)
    if pixels.ndim not in (3, 4) or pixels.shape[-1] not in (3, 4):
        raise ValueError(
            f"An array of pixels has the shape (H, W, 3), (3, H, W), or (B, H, W, 3) for B pictures, or 4 channels "
            f"for RGBA, got {shape}: give grey pixels of the shape (H, W) as `Image.fromarray(pixels)`"
        )
    levels = pixels if pixels.dtype == np.uint8 else float_levels(pixels)
    if levels is None:
        raise ValueError(
            f"Pixels as floats are {FLOAT_RANGES}, got {pixels.min():g} to {pixels.max():g}: "
            "give them before normalisation, clipped to their range"
        )
    for picture in levels if levels.ndim == 4 else [levels]:
        yield GivenPicture(Image.fromarray(np.ascontiguousarray(picture)))
