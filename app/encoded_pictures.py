"""Pictures that were encoded lately, by digest, so that the next question about one need not look at it again."""

import threading
from collections import OrderedDict

from llm.model.adapter import Prefix


class EncodedPictures:
    """What the decoder reads of a picture, kept for up to `max_bytes`; who was asked about longest ago goes first.

    Threads may share it.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, digest: str) -> Prefix | None:
        """The prefix (A, 1, N, Q, H) of the picture with this digest, where it is kept."""
        with self._lock:
            prefix = self._prefixes.get(digest)
            if prefix is not None:
                self._prefixes.move_to_end(digest)
            return prefix

    def keep(self, digest: str, prefix: Prefix) -> Prefix:
        """Keep a picture's prefix; returns it, no longer a view of its whole batch."""
        # One row of many would keep all of them in memory.
        prefix = Prefix(prefix.k.clone(), prefix.v.clone())
        with self._lock:
            self._forget(digest)
            self._prefixes[digest] = prefix
            self._num_bytes += _bytes_of(prefix)
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._prefixes)))
        return prefix

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._prefixes.clear()
            self._num_bytes = 0

    def _forget(self, digest: str) -> None:
        prefix = self._prefixes.pop(digest, None)
        if prefix is not None:
            self._num_bytes -= _bytes_of(prefix)


def _bytes_of(prefix: Prefix) -> int:
    return prefix.k.nbytes + prefix.v.nbytes
