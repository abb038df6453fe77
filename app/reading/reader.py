"""One picture -> the square of pixels that the encoder takes, or why there is none. For any number of threads."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from app.answers import AnswerError
from app.reading.sources import FileSlice, Source
from app.spec import CaptionerSpec
from vision.errors import PictureError
from vision.formats import shown_name
from vision.image import DEFAULT_MAX_BYTES, DEFAULT_MAX_PIXELS, load_picture, read_picture_file
from vision.preprocess import preprocess


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureReading:
    """A picture as it was read: its pixels, or why they could not be had."""

    digest: str  # of the file's bytes; empty when they could not be read
    pixels: np.ndarray | None  # uint8 (size, size, 3)
    error: AnswerError | None
    elapsed_ms: float

    @property
    def is_only_digest(self) -> bool:
        """Whether nothing was decoded, since the digest told enough."""
        return self.pixels is None and self.error is None


class Reader(Protocol):
    """Reads pictures, here or in other processes. Any number of threads may call `read` at once."""

    def read(
        self, source: Source, *, name: str | None = None, wants_pixels: Callable[[str], bool] | None = None
    ) -> PictureReading:
        """Read one picture; what is wrong with it comes back as `error`. Messages call bytes by `name`.

        `wants_pixels` is asked with the digest before anything is decoded: where it says no, that is all.
        """
        ...

    def close(self) -> None:
        """Let go of what reading takes; harmless when repeated."""
        ...


class PictureReader:
    """Reads and resizes in the calling thread, for an encoder that sees squares of `size` pixels.

    What hangs in the operating system or in a decoder hangs the thread: `IsolatedReader` can end that.
    """

    def __init__(self, spec: CaptionerSpec, *, size: int) -> None:
        self._spec, self._size = spec, size
        # Who trained on OpenCV's order of colours read with OpenCV, which gives plain colours before any resizing.
        self._convert: Literal["last", "first"] = "first" if spec.channel_order == "bgr" else "last"
        # Twice the size, so that the last step still averages over what is there.
        self._least_side = 2 * size if spec.reading == "fast" else None

    def read(
        self,
        source: Source,
        *,
        name: str | None = None,
        wants_pixels: Callable[[str], bool] | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> PictureReading:
        """As `Reader.read`, within limits."""
        started = time.perf_counter()
        digest, pixels, problem = "", None, None
        try:
            if isinstance(source, FileSlice):
                source = source.read(max_bytes=max_bytes)
            elif wants_pixels is not None and isinstance(source, (str, os.PathLike)):
                # The file's bytes first, so that they are hashed before anything is made of them.
                name, source = shown_name(source), read_picture_file(source, max_bytes=max_bytes)
            if wants_pixels is not None and isinstance(source, bytes) and source:
                digest = hashlib.sha256(source).hexdigest()
            if wants_pixels is None or not digest or wants_pixels(digest):
                loaded = load_picture(
                    source,
                    name=name,
                    orientation=self._spec.exif,
                    least_side=self._least_side,
                    max_pixels=max_pixels,
                    max_bytes=max_bytes,
                    digest=digest or None,
                )
                digest = loaded.digest
                pixels = preprocess(loaded.image, size=self._size, convert=self._convert, reading=self._spec.reading)
        except PictureError as error:
            digest = digest or error.digest
            problem = AnswerError(code=error.code, message=error.message)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return PictureReading(digest=digest, pixels=pixels, error=problem, elapsed_ms=elapsed_ms)

    def close(self) -> None:
        """Nothing is held."""
