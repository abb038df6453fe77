"""Reads safetensors as numpy arrays and JSON objects, and checks files before they are opened. Imports no torch."""

import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from llama_adapter.runtime.device_failures import tells_shortage
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.json_object import read_object
from llama_adapter.runtime.text import shown_excerpt

_NUMBERS: Final[Mapping[str, Any]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
}
_SHOWN_KEYS: Final = 12
_MAX_JSON: Final = 16 << 20  # bytes; the largest shard index has a hundredth of this


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a safetensors file. Raises CheckpointError for a missing, damaged or foreign file."""
    with open_safetensors(path, framework="numpy") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, mapped; bfloat16 as its bits, uint16.

    Raises OSError, and KeyError or ValueError for a damaged file and for other types of numbers.
    """
    content = np.asarray(np.memmap(path, np.uint8, "r"))  # slices of a memmap are slow
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header, found = read_object(content[8:start].tobytes().decode()), dict[str, np.ndarray]()
    for name in header.keys() - {"__metadata__"}:
        number, (first, end) = np.dtype(_NUMBERS[header[name]["dtype"]]), header[name]["data_offsets"]
        part: np.ndarray = content[start:][max(first, 0) : end]
        found[name] = part.view(number).reshape([max(size, 0) for size in header[name]["shape"]])
    return found


@contextmanager
def open_safetensors(path: Path, *, framework: str) -> Iterator[Any]:
    """The opened file. Raises CheckpointError if it is missing, damaged or foreign, also while it is read."""
    from safetensors import SafetensorError, safe_open  # JSON needs none of it

    require_file(path)
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:  # TypeError: numpy lacks the type
        if tells_shortage(str(error)):
            raise
        raise damaged(path) from None


def require_file(path: Path) -> None:
    """Raise CheckpointError unless `path` is a regular file that is neither empty nor a Git LFS pointer."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"The path {str(path)!r} is not UTF-8, so torch and safetensors cannot open it", hint="rename the folder"
        ) from None
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise CheckpointError(f"`{path}` is {kind}, where a file is wanted")
        with path.open("rb") as file:
            head = file.read(24)
    except FileNotFoundError:
        raise CheckpointError(f"There is no file `{path}`") from None
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}") from None
    if not head:
        raise CheckpointError(f"`{path}` is empty", hint="the download failed; fetch it again")
    if head == b"version https://git-lfs.":
        raise CheckpointError(
            f"`{path}` is a Git LFS pointer, not the file itself", hint="fetch it with `git lfs pull`"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if the file is missing or contains something else."""
    require_file(path)
    if path.stat().st_size > _MAX_JSON:
        raise CheckpointError(
            f"`{path}` has {path.stat().st_size:,} bytes, and such files have {_MAX_JSON:,} at most",
            hint="it is another file, or damaged; copy it again",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"`{path}` is no JSON: {shown_excerpt(str(error))}", hint="the file is damaged; copy it again"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` holds a {type(content).__name__}, where a JSON object is wanted")
    return content


def damaged(path: Path, what: str = "") -> CheckpointError:
    """The error for a file that cannot be opened."""
    reason = f" ({shown_excerpt(what)})" if what else ""
    return CheckpointError(
        f"`{path}` ({path.stat().st_size:,} bytes) cannot be opened: it is cut short, damaged, or no tensor file"
        + reason,
        hint="compare its size with the place it came from, and copy it again",
    )


def list_keys(keys: Sequence[str]) -> str:
    """The first twelve keys for a message, and the number of further keys."""
    told = ", ".join(f"`{shown_excerpt(key)}`" for key in keys[:_SHOWN_KEYS])
    rest = len(keys) - _SHOWN_KEYS
    return f"{told} and {rest} more" if rest > 0 else told
