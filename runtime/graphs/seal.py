"""The digest of an exported ONNX file, stored inside the file, which detects changes after the export.

The digest covers the file, with zeros in place of the digest, and the file of external weights. It detects damage and
mixed-up files, but not deliberate changes, because anyone can compute the digest again.
"""

import hashlib
import mmap
import re
from pathlib import Path
from typing import Final

from llama_adapter.runtime.errors import GraphError

SEAL_KEY: Final = "llama_adapter_sha256"  # in the file's metadata; the digest and, after a space, the external file
_BLANK: Final = "0" * 64
_DIGEST: Final = re.compile(rb"[0-9a-f]{64}")
_WINDOW: Final = 16  # maximum number of bytes between the key and its value in the file
_AGAIN: Final = "copy the file again, or export the model again with `llama-adapter export`"


def blank_seal(weights: str | None) -> str:
    """The metadata entry for a file before `seal`. `weights` is the name of its external file."""
    return _BLANK if weights is None else f"{_BLANK} {weights}"


def seal(path: Path, *, weights: str | None) -> None:
    """Write the digest into a file that was written with the entry of `blank_seal`."""
    found = _digest(path, weights or "")
    if found is None:
        raise AssertionError(f"`{path}` was written without a place for its digest")
    place, digest = found
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digest.encode())


def check_seal(path: Path, entry: str | None) -> None:
    """Raise GraphError for a file that was changed after `seal`. `entry` is its metadata entry SEAL_KEY.

    Files without an entry, from other programs and older releases, are accepted. Reads the whole file.
    """
    if entry is None:
        return
    digest, _, weights = entry.partition(" ")
    found = _digest(path, weights) if Path(weights).name == weights else None
    if found is None or found[1] != digest:
        raise GraphError(f"`{path}` was changed after its export: its digest differs from the stored one", hint=_AGAIN)


def _digest(path: Path, weights: str) -> tuple[int, str] | None:
    """The offset of the stored digest, and the digest that it should be; None if a file or the digest is missing."""
    hasher = hashlib.sha256()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.rfind(SEAL_KEY.encode()) + len(SEAL_KEY)
        match = _DIGEST.search(content, start, start + _WINDOW + len(_BLANK))
        if start < len(SEAL_KEY) or match is None:
            return None
        with memoryview(content) as view, view[: match.start()] as head, view[match.end() :] as tail:
            for part in (head, _BLANK.encode(), tail):
                hasher.update(part)
    try:
        if weights:
            with (path.parent / weights).open("rb") as file:
                hashlib.file_digest(file, lambda: hasher)
    except OSError:
        return None
    return match.start(), hasher.hexdigest()
