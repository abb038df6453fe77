"""OM files on disk: the JSON side-car that describes an OM, and the requirements of InferSession on the file."""

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import GraphCard, Port
from llama_adapter.runtime.json_object import check_fields, read_object, take_version

FORMAT_VERSION: Final = 2
MAX_OM_BYTES: Final = 10 * 1024**3
OM_MODE: Final = 0o640  # the most rights of an OM and its side-car: InferSession refuses files that others may write
_WHOLE_BYTES: Final = 64 << 20  # files up to this size are read whole for their mark
_BLOCK_BYTES, _NUM_BLOCKS = 64 << 10, 256  # the parts of larger files that are read for their mark
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "card": (dict, type(None)),
    "input": dict,
    "batch_sizes": list,
    "has_gears": bool,
    "soc_version": str,
    "precision_mode": str,
    "sha256": str,
    "onnx_sha256": str,
}
_LEGAL_PATH: Final = re.compile(r"[A-Za-z0-9_./-]+")
_MAX_BYTES = 1 << 20  # largest size of a side-car
_MAX_PATH, _MAX_COMPONENT, _MAX_DEPTH = 4096, 255, 32
_AGAIN = "make the OM again with `llama-adapter export om`"


@dataclass(frozen=True, kw_only=True, slots=True)
class OmSidecar:
    """The facts that cannot be read from an OM file itself: its model, its batch sizes and its origin."""

    card: GraphCard | None  # None for a graph of another program
    input: Port  # without a name; stored because a number of bytes determines neither type nor layout
    batch_sizes: tuple[int, ...]  # ascending
    has_gears: bool  # made with --dynamic_batch_size, for all batch sizes; otherwise there is one fixed batch size
    soc_version: str
    precision_mode: str
    sha256: str  # of the .om
    onnx_sha256: str  # of the .onnx followed by its external weights

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or any(type(size) is not int or size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"batch_sizes must be whole numbers of at least 1, ascending, got {sizes!r}")
        if not self.has_gears and len(sizes) != 1:
            raise ValueError(f"an OM without gears has one batch size, got {sizes!r}")

    def to_json(self) -> str:
        """The text that is stored next to the OM."""
        values = {
            "version": FORMAT_VERSION,
            **dataclasses.asdict(self),
            "card": None if self.card is None else json.loads(self.card.to_json()),
            "input": {"dtype": self.input.dtype, "layout": _layout(self.input), "shape": list(self.input.shape)},
        }
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, file: str) -> "OmSidecar":
        """Inverse of `to_json`. Raises GraphError, which names `file`, for damage and for other versions."""
        try:
            values = read_object(text)
            take_version(values, FORMAT_VERSION)
            check_fields(values, _FIELDS, what="the side-car")
            stored = values.pop("card")
            card = None if stored is None else GraphCard.from_json(json.dumps(stored), file=file)
            taken, batch_sizes = _read_input(values.pop("input")), tuple(values.pop("batch_sizes"))
            return cls(card=card, input=taken, batch_sizes=batch_sizes, **values)
        except ValueError as error:
            raise GraphError(f"The side-car `{file}` cannot be read: {error}", hint=_AGAIN) from None


def _layout(port: Port) -> str:
    """`NHWC` for pictures with colour last, `NCHW` with colour first; `ND` for anything else."""
    if len(port.shape) != 4:
        return "ND"
    return "NHWC" if port.shape[3] == 3 else "NCHW" if port.shape[1] == 3 else "ND"


def _read_input(values: dict[str, Any]) -> Port:
    check_fields(values, {"dtype": str, "layout": str, "shape": list}, what="input")
    if any(type(size) is not int for size in values["shape"]):
        raise ValueError(f"shape of input must be whole numbers, and is {values['shape']!a}")
    found = Port(dtype=values["dtype"], shape=tuple(values["shape"]))
    if values["layout"] != _layout(found):
        raise ValueError(f"the layout of the input is said to be {values['layout']!a}, and {found} is {_layout(found)}")
    return found


def sidecar_path(om_path: str | os.PathLike[str]) -> Path:
    """`clip.om` -> `clip.om.json`."""
    path = Path(om_path)
    return path.with_name(path.name + ".json")


def write_sidecar(om_path: str | os.PathLike[str], text: str) -> Path:
    """Write the text of an OM's side-car, complete or not at all; returns its path."""
    target = sidecar_path(om_path)
    with atomic_write(target) as file:
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & OM_MODE)
        file.write(text.encode())
    return target


def read_sidecar(om_path: str | os.PathLike[str]) -> OmSidecar | None:
    """The side-car of an OM; None if there is none. Raises GraphError if it is damaged or cannot be read."""
    path = sidecar_path(om_path)
    text = read_text(path)
    return None if text is None else OmSidecar.from_json(text, file=str(path))


def read_text(path: Path) -> str | None:
    """The text of a side-car; None if there is no such file. Raises GraphError if it cannot be read."""
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _MAX_BYTES):
            raise OSError(0, "it is no file, or too large")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise GraphError(f"The side-car `{path}` cannot be read: {reason}", hint=_AGAIN) from None


def read_valid_sidecar(om_path: str | os.PathLike[str]) -> OmSidecar | None:
    """As `read_sidecar`, and raises GraphError if the OM has a different digest. Reads the whole OM."""
    sidecar = read_sidecar(om_path)
    if sidecar is not None:
        check_digest(om_path, sidecar.sha256, again=_AGAIN)
    return sidecar


def check_digest(om_path: str | os.PathLike[str], sha256: str, *, again: str) -> None:
    """Raise GraphError unless the OM has the digest in its side-car. Reads the whole OM."""
    if file_digest(om_path) != sha256:
        raise GraphError(
            f"The side-car `{sidecar_path(om_path).name}` is that of another file than `{om_path}`: the digests differ",
            hint=f"copy both again, they are written together; or {again}",
        )


def file_mark(path: Path) -> str:
    """Identifies a file's content: SHA-256 of its size and its bytes; for large files, of 256 blocks of 64 KiB.

    Reading 13 GB at every start would take longer than loading them. The mark detects mixed-up and truncated files,
    and most damage.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} ".encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def check_om_file(path: str | os.PathLike[str]) -> None:
    """Raise GraphError, with the reason, for a file that ais_bench's InferSession (since 2024-06) would refuse.

    InferSession reports only that the path is illegal. Older releases accept more files. All releases accept a file
    that passes this check.
    """
    absolute = os.path.abspath(path)
    check_om_path(absolute)
    try:
        status = os.lstat(absolute)
        if stat.S_ISLNK(status.st_mode):
            raise GraphError(
                f"The OM `{absolute}` is a symbolic link, which InferSession refuses",
                hint=f"pass the file itself, {os.path.realpath(absolute)}, or copy it and its side-car",
            )
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise GraphError(
            f"The OM `{absolute}` {reason}", hint="`llama-adapter export om` makes one from an ONNX file"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise GraphError(f"`{absolute}` is no regular file, where an OM is wanted")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise GraphError(
            f"The OM `{absolute}` can be written by others (mode {stat.S_IMODE(status.st_mode):o}), "
            "which InferSession refuses",
            hint=f"chmod 640 {absolute}",
        )
    # Checked for root too: in a container, a mounted file may belong to another user.
    if status.st_uid != os.geteuid() and status.st_gid not in os.getgroups():
        raise GraphError(
            f"The OM `{absolute}` belongs to another user (user {status.st_uid}, group {status.st_gid}), "
            "which InferSession refuses",
            hint="copy it, so that it is yours",
        )
    if not (os.access(absolute, os.R_OK) and status.st_mode & stat.S_IRUSR):
        raise GraphError(f"The OM `{absolute}` lacks the right to be read", hint=f"chmod 640 {absolute}")
    if not status.st_size:
        raise GraphError(f"The OM `{absolute}` is empty", hint=_AGAIN)
    if status.st_size > MAX_OM_BYTES:
        raise GraphError(f"The OM `{absolute}` has {status.st_size:,} bytes, and InferSession takes {MAX_OM_BYTES:,}")


def check_om_path(path: str | os.PathLike[str]) -> None:
    """The checks of `check_om_file` that need only the path, for use before the file exists. Raises GraphError."""
    absolute = os.path.abspath(path)
    if absolute.lower().endswith(".onnx"):
        raise GraphError(
            f"`{absolute}` is an ONNX file, where an OM is wanted",
            hint="use `--vision onnx`, or make an OM of it with `llama-adapter export om`",
        )
    if not absolute.endswith(".om"):
        raise GraphError(
            f"`{absolute}` does not end in .om, as InferSession demands of an OM",
            hint="`llama-adapter export om` makes one from an ONNX file, with a name that InferSession takes",
        )
    if not _LEGAL_PATH.fullmatch(absolute):
        illegal = "".join(sorted(set(_LEGAL_PATH.sub("", absolute))))
        raise GraphError(
            f"The path `{absolute}` has characters that InferSession refuses: {illegal!a}",
            hint="choose a path of letters, digits and _ . / - only",
        )
    parts = absolute.split("/")
    if len(absolute) > _MAX_PATH or len(parts) > _MAX_DEPTH + 1 or any(len(part) > _MAX_COMPONENT for part in parts):
        raise GraphError("The path of the OM is too long for InferSession", hint="choose a shorter path")
