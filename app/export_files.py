"""Where the export commands may put their files: asked before the work, which takes minutes."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from app.errors import UsageError
from vision.errors import EncoderError


def check_place(target: Path, *, shown: str) -> None:
    """Raise EncoderError, before the work, where no file can be made at `target`; nothing is left behind."""
    folder = next(parent for parent in Path(os.path.abspath(target)).parents if parent.exists())
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        os.rmdir(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=folder))
    except OSError as error:
        raise EncoderError(
            f"`{shown}` cannot be written: {error.strerror}", hint="name another place as --out"
        ) from None


def refuse_to_replace(paths: Sequence[Path], *, force: bool, other: str = ", or name another one as --out") -> None:
    """Raise UsageError for a file that is there already, unless by `force`."""
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise UsageError(f"`{there[0]}` exists already", hint=f"replace it with --force{other}")
