"""Files for the tests of inputs."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from llama_adapter.app.pictures.inputs import InputSpec, PictureInput, read_inputs


def fill(folder: Path, *names: str) -> Path:
    """Create files with these names, which are their content."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


def named(*paths: str | Path, recursive: bool = False) -> list[PictureInput]:
    """The items that these paths give."""
    return list(read_inputs(InputSpec(paths=tuple(map(str, paths)), recursive=recursive)))


def locked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Refuse to list folders of this name."""
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith(name):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)


def message(item: PictureInput) -> str:
    """The message of an item that is an error."""
    return item.error.message


def error_codes(items: list[PictureInput]) -> list[str | None]:
    """The error code of each item."""
    return [None if item.error is None else item.error.code for item in items]


def tar_bytes(
    members: dict[str, bytes] | list[tuple[str, bytes]], *, mode: str = "w", format: int = tarfile.PAX_FORMAT
) -> bytes:
    """A tar archive with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=format) as tar:  # type: ignore[call-overload]
        for name, data in members.items() if isinstance(members, dict) else members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return buffer.getvalue()
