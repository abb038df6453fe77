"""Encoded pictures, and a cache of them by digest."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llama_adapter.llm.prefix import Prefix, TextPrefix
from llama_adapter.vision.formats import PictureNote


class EncodedPicture(NamedTuple):
    """An encoded picture, ready for the decoder."""

    prefix: Prefix  # (A, 1, N, Q, H)
    unfamiliar: bool | None = None  # whether it is out of distribution; None: the model cannot tell
    notes: tuple[PictureNote, ...] = ()  # set in a cache, which has no reading


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
        """Add a picture; returns a copy whose prefix is not a view into the tensors of its batch."""
        # A view would keep the whole batch in memory.
        prefix = picture.prefix.copy()
        picture = picture._replace(prefix=prefix)
        with self._lock:
            self._drop(digest)
            self._pictures[digest] = picture
            self._num_bytes += _bytes_of(prefix)
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
            self._num_bytes -= _bytes_of(picture.prefix)


def _bytes_of(prefix: Prefix) -> int:
    return int(prefix.k.nbytes + prefix.v.nbytes)
