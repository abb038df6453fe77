"""Encoded pictures, and a cache of them by digest."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from llama_adapter.llm.picture_format import Grid
from llama_adapter.llm.prefix import Prefix, TextPrefix, copied
from llama_adapter.vision.formats import PictureNote


class Square(NamedTuple):
    """The tokens of a square of a picture, and a digest of its pixels."""

    embeddings_SD: Any
    digest: str


class EncodedPicture(NamedTuple):
    """An encoded picture, ready for the decoder; or the pictures of one prompt, if they are tokens of it."""

    prefix: Prefix  # (A, 1, N, Q, H)
    find_unfamiliar: Callable[[], bool] | None = None  # whether it is out of distribution; None: the model cannot tell
    notes: tuple[PictureNote, ...] = ()  # set in a cache, which has no reading
    grids: tuple[Grid, ...] = ()  # of pictures that are tokens
    squares: tuple[Square, ...] = ()  # of all their grids


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrefixes:
    """The prefixes of prompts without a picture, encoded when first needed."""

    zeros: np.ndarray  # (S, S, 3), a picture of zeros after normalisation
    encoded: dict[TextPrefix, EncodedPicture] = field(default_factory=dict)


class EncodedPictures:
    """A cache that holds up to `max_bytes` of prefixes and drops the least recently used. Thread-safe."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pictures: OrderedDict[str, EncodedPicture] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pictures)

    def find(self, digest: str) -> EncodedPicture | None:
        """The picture with this digest, None if it is not in the cache."""
        with self._lock:
            picture = self._pictures.get(digest)
            if picture is not None:
                self._pictures.move_to_end(digest)
            return picture

    def keep(self, digest: str, picture: EncodedPicture) -> EncodedPicture:
        """Add a picture; returns a copy whose tensors are not views into those of its batch."""
        # A view would keep the whole batch in memory.
        squares = tuple(square._replace(embeddings_SD=copied(square.embeddings_SD)) for square in picture.squares)
        if (find := picture.find_unfamiliar) is not None:
            is_unfamiliar = find()
            picture = picture._replace(find_unfamiliar=lambda: is_unfamiliar)
        picture = picture._replace(prefix=picture.prefix.copy(), squares=squares)
        with self._lock:
            self._drop(digest)
            self._pictures[digest] = picture
            self._num_bytes += _bytes_of(picture)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._pictures)))
        return picture

    def clear(self) -> None:
        """Drop all pictures."""
        with self._lock:
            self._pictures.clear()
            self._num_bytes = 0

    def _drop(self, digest: str) -> None:
        picture = self._pictures.pop(digest, None)
        if picture is not None:
            self._num_bytes -= _bytes_of(picture)


def _bytes_of(picture: EncodedPicture) -> int:
    parts = (*picture.prefix, *(square.embeddings_SD for square in picture.squares))
    return int(sum(part.nbytes for part in parts))
