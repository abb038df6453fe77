"""The digest of an exported ONNX file, stored inside it, which shows a change after the export.

It covers the file, with zeros in the digest's own place, and the file of external weights. It finds damage and mix-ups,
not a deliberate change: the digest can be computed again.
"""

import hashlib
import mmap
from pathlib import Path
from typing import Final

from llama_adapter.runtime.errors import GraphError

SEAL_KEY: Final = "llama_adapter_sha256"  # in the file's metadata; the digest and, after a space, the external file
_BLANK: Final = "0" * 64
_WINDOW: Final = 16  # bytes between the key and its value in the file
_AGAIN: Final = "copy the file again, or export the model again with `llama-adapter export`"


def blank_seal(weights: str | None) -> str:
    """The metadata entry to write a file with before `seal`; `weights` is the name of its external file."""
    return _BLANK if weights is None else f"{_BLANK} {weights}"


def seal(path: Path, *, weights: str | None) -> None:
    """Put the digest into a file that was written with `blank_seal`."""
    digest = _digest(path, _BLANK, weights=weights)
    if digest is None:
        raise AssertionError(f"`{path}` was written without a place for its digest")
    with path.open("r+b") as file:
        file.seek(_find(path, _BLANK))
        file.write(digest.encode())


def check_seal(path: Path, entry: str | None) -> None:
    """Raise GraphError for a file that was changed after `seal`; `entry` is its metadata under SEAL_KEY.

    Files without an entry, of other programs and older releases, pass. Reads the whole file.
    """
    if entry is None:
        return
    digest, _, weights = entry.partition(" ")
    if len(digest) != len(_BLANK) or Path(weights).name != weights or _digest(path, digest, weights=weights) != digest:
        raise GraphError(
            f"`{path}` was changed after its export: its bytes have another digest than the one it carries", hint=_AGAIN
        )


def _digest(path: Path, written: str, *, weights: str | None) -> str | None:
    """SHA-256 of the file with zeros where the digest `written` stands, then of its external weights."""
    at = _find(path, written)
    if at < 0:
        return None
    hasher = hashlib.sha256()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        view = memoryview(content)
        for part in (view[:at], _BLANK.encode(), view[at + len(written) :]):
            hasher.update(part)
            if isinstance(part, memoryview):
                part.release()
        view.release()
    if weights:
        try:
            with (path.parent / weights).open("rb") as file:
                hashlib.file_digest(file, lambda: hasher)
        except OSError:
            return None
    return hasher.hexdigest()


def _find(path: Path, written: str) -> int:
    """Where the digest stands in the file; -1 if nowhere."""
    key = SEAL_KEY.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.rfind(key)
        if at < 0:
            return -1
        start = at + len(key)
        return content.find(written.encode(), start, start + _WINDOW + len(written))
