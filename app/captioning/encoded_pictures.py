"""Pictures that were encoded lately, by digest, so that the next question about one need not look at it again."""

import threading
from collections import OrderedDict
from typing import NamedTuple

from llama_adapter.llm.model.adapter import Prefix


class EncodedPicture(NamedTuple):
    """What the decoder reads of a picture, and whether it is unlike those that the model was trained on."""

    prefix: Prefix  # (A, 1, N, Q, H)
    unfamiliar: bool | None = None  # None: the model cannot tell


class EncodedPictures:
    """What is known of pictures, kept for up to `max_bytes` of prefixes; who was asked about longest ago goes first.

    Threads may share it.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pictures: OrderedDict[str, EncodedPicture] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pictures)

    def find(self, digest: str) -> EncodedPicture | None:
        """The picture with this digest, where it is kept."""
        with self._lock:
            picture = self._pictures.get(digest)
            if picture is not None:
                self._pictures.move_to_end(digest)
            return picture

    def keep(self, digest: str, picture: EncodedPicture) -> EncodedPicture:
        """Keep a picture; returns it, its prefix no longer a view of its whole batch."""
        # One row of many would keep all of them in memory.
        prefix = Prefix(picture.prefix.k.clone(), picture.prefix.v.clone())
        picture = picture._replace(prefix=prefix)
        with self._lock:
            self._forget(digest)
            self._pictures[digest] = picture
            self._num_bytes += _bytes_of(prefix)
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._pictures)))
        return picture

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._pictures.clear()
            self._num_bytes = 0

    def _forget(self, digest: str) -> None:
        picture = self._pictures.pop(digest, None)
        if picture is not None:
            self._num_bytes -= _bytes_of(picture.prefix)


def _bytes_of(prefix: Prefix) -> int:
    return prefix.k.nbytes + prefix.v.nbytes
