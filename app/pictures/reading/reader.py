"""Reads one picture into a square of pixels for the encoder, or into an error. Thread-safe."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast, get_args

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.prefixes.file import PrefixFileError, PrefixRow, StoredPicture, read_first_file
from llama_adapter.app.pictures.reading.sources import FileSlice, Source
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.llm.prefix import TextPrefix
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.files import read_picture_file
from llama_adapter.vision.formats import PictureNote
from llama_adapter.vision.pixels import PixelRule

if TYPE_CHECKING:  # what decodes pictures, numpy and Pillow, is imported for the first picture that is decoded
    import numpy as np

    from llama_adapter.vision.image import LoadedPicture

_NO_ENCODER: Final = (
    "Wanted an encoded picture, because this run began with prefix files and loaded no encoder; answer for pictures in "
    "a run of their own."
)
_HAS_ENCODER: Final = (
    "This picture is encoded already, and the model was loaded to encode pictures; load it with vision prefixes and "
    "the prefix file as encoder."
)

# Codes of `AnswerError` for one picture, in addition to `vision.errors.PICTURE_ERROR_CODES`.
TIMEOUT: Final = "timeout"  # it was not read in time
CRASHED: Final = "crashed"  # the process that read it ended

_DECODING = threading.Lock()  # of given images: threads may share one, and Pillow decodes it in place


def _forget_holder() -> None:
    global _DECODING  # the thread that holds the lock is not in the child
    _DECODING = threading.Lock()


os.register_at_fork(after_in_child=_forget_holder)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureReading:
    """The result of reading one picture: its pixels, or an error.

    For a prompt without a picture, `digest` is a `TextPrefix`.
    """

    digest: str = ""  # SHA-256 of the file's bytes in hexadecimal; "" if they could not be read
    pixels: "np.ndarray | None" = None  # uint8 (S, S, 3), or (H, W, 3) for a sheet of squares or a view
    encoded: StoredPicture | None = None  # from a prefix file, instead of pixels
    error: AnswerError | None = None
    elapsed_ms: float = 0.0
    width: int = 0  # of the original picture, in pixels; 0 without pixels
    height: int = 0
    notes: tuple[PictureNote, ...] = ()
    others: "tuple[np.ndarray, ...]" = ()  # pixels of the other pictures of the same prompt

    @property
    def is_only_digest(self) -> bool:
        """Whether nothing was decoded, because the digest was enough."""
        has_content = self.pixels is not None or self.encoded is not None or self.error is not None
        return not has_content and self.digest not in get_args(TextPrefix)

    @property
    def content(self) -> "np.ndarray | tuple[np.ndarray, ...] | StoredPicture | TextPrefix":
        """What to encode, for a reading without error: pixels, a stored picture, or a text prefix."""
        if self.pixels is not None:
            return (self.pixels, *self.others) if self.others else self.pixels
        if self.encoded is not None:
            return self.encoded
        assert self.digest in get_args(TextPrefix), "a picture without pixels has an error"
        return cast(TextPrefix, self.digest)


def joined(readings: Sequence[PictureReading]) -> PictureReading:
    """The pictures of one prompt. The error is the first one, and the digest that of their digests."""
    first, *others = readings
    return replace(
        first,
        digest=joined_digest([reading.digest for reading in readings]),
        error=next((reading.error for reading in readings if reading.error is not None), None),
        elapsed_ms=sum(reading.elapsed_ms for reading in readings),
        notes=tuple(dict.fromkeys(note for reading in readings for note in reading.notes)),
        others=tuple(reading.pixels for reading in others if reading.pixels is not None),
    )


def joined_digest(digests: Sequence[str]) -> str:
    """The digest of the pictures of a prompt: of one, its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


class Reader(Protocol):
    """Reads pictures, in this process or in others. Any number of threads may call `read` at once."""

    def read(
        self,
        source: Source,
        *,
        name: str | None = None,
        wants_pixels: Callable[[str], bool] | None = None,
        side: int | None = None,
    ) -> PictureReading:
        """Read one picture; problems are returned as `error`. Messages use `name` for pictures given as bytes.

        `wants_pixels` is called with the digest before anything is decoded. If it returns False, nothing is decoded.
        With `side`, the pixels are a view for display, upright and at most `side` pixels wide and high, instead of the
        encoder's square.
        """
        ...

    def close(self) -> None:
        """Release threads, processes and files. May be called repeatedly."""
        ...


class PictureReader:
    """Reads and resizes in the calling thread, for an encoder that takes pictures by the rule `pixels`.

    A decoder or file system that hangs blocks the thread, and for a given PIL image also other threads' given images.
    `IsolatedReader` has a time limit.
    """

    def __init__(self, spec: ReadingSpec, *, pixels: PixelRule, process: Callable[[Any], Any] | None = None) -> None:
        """`process` is called with each PIL image as `spec` wants it, by one thread at a time, before it is resized."""
        self._turn = threading.Lock()
        self._spec, self._pixels, self._process = spec, pixels, process
        # Models with channel order bgr were trained with OpenCV, which converts to plain colours before resizing.
        self._convert: Literal["last", "first"] = "first" if spec.channel_order == "bgr" else "last"
        # Twice the size, so that the final resize still averages pixels.
        side = pixels.longest or pixels.image_size + pixels.margin
        self._least_side = 2 * side if spec.reading == "fast" else None

    def read(
        self,
        source: Source,
        *,
        name: str | None = None,
        wants_pixels: Callable[[str], bool] | None = None,
        side: int | None = None,
    ) -> PictureReading:
        """As `Reader.read`."""
        started = time.perf_counter()
        max_bytes = self._spec.max_bytes
        digest, pixels, problem = "", None, None
        seen: dict[str, Any] = {}  # fields of the reading, of a picture without error
        try:
            if isinstance(source, PrefixRow):
                digest = source.digest
                encoded = self._encoded(source) if wants_pixels is None or wants_pixels(digest) else None
                elapsed_ms = (time.perf_counter() - started) * 1e3
                return PictureReading(digest=digest, encoded=encoded, elapsed_ms=elapsed_ms, notes=source.notes)
            if self._spec.prefixes is not None and side is None:
                raise PictureError("unsupported", _NO_ENCODER)
            if isinstance(source, FileSlice):
                source = source.read(max_bytes=max_bytes)
            elif wants_pixels is not None and isinstance(source, (str, os.PathLike)):
                # The file is read first, so that its bytes are hashed before they are decoded.
                name, source = shown_name(source), read_picture_file(source, max_bytes=max_bytes)
            if wants_pixels is not None and isinstance(source, bytes) and source:
                digest = hashlib.sha256(source).hexdigest()
            if wants_pixels is None or not digest or wants_pixels(digest):
                from llama_adapter.vision.image import load_picture

                with _DECODING if hasattr(source, "getpixel") else nullcontext():
                    loaded = load_picture(
                        source,
                        name=name,
                        orientation=self._spec.exif if side is None else "upright",
                        transparency=self._spec.transparency if side is None else "white",
                        damaged=self._spec.damaged,
                        least_side=self._least_side if side is None else side,
                        max_pixels=self._spec.max_pixels,
                        max_bytes=max_bytes,
                        digest=digest or None,
                    )
                if self._process is not None and side is None:
                    with self._turn:
                        processed = load_picture(self._process(loaded.image), name=name, orientation="ignore")
                    loaded = replace(processed, notes=loaded.notes)
                digest = loaded.digest
                pixels = self._square(loaded) if side is None else _view(loaded, side=side)
                seen = {"width": loaded.width, "height": loaded.height, "notes": loaded.notes}
        except PictureError as error:
            digest = digest or error.digest
            problem = AnswerError(code=error.code, message=error.message)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return PictureReading(digest=digest, pixels=pixels, error=problem, elapsed_ms=elapsed_ms, **seen)

    def close(self) -> None:
        """Nothing to release."""

    def _encoded(self, source: PrefixRow) -> StoredPicture:
        """Read a row. Raises `PictureError`, also if the row's encoding is not the one the captioner was loaded for."""
        if self._spec.prefixes is None:
            raise PictureError("unsupported", _HAS_ENCODER)
        try:
            return source.read(read_first_file(self._spec.prefixes))
        except PrefixFileError as error:
            raise PictureError("unreadable", f"{error.message}; {error.hint}.") from None

    def _square(self, loaded: "LoadedPicture") -> "np.ndarray":
        from llama_adapter.vision.preprocess import preprocess

        return preprocess(
            loaded.image, name=loaded.name, rule=self._pixels, convert=self._convert, reading=self._spec.reading
        )


def _view(loaded: "LoadedPicture", *, side: int) -> "np.ndarray":
    """As `view_pixels`. Raises `PictureError`."""
    from llama_adapter.app.pictures.reading.views import view_pixels

    try:
        return view_pixels(loaded.image, side=side)
    except MemoryError:
        raise PictureError("too_large", f"There is not enough memory to show {loaded.name}; make it smaller.") from None
    except Exception as error:  # Pillow raises many types for a mode that it cannot convert
        raise PictureError(
            "unsupported", f"Wanted to show {loaded.name}, but its pixels do not convert: {type(error).__name__}."
        ) from None
