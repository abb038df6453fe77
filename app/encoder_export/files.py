"""Where the export commands may put their files: asked before the work, which takes minutes."""

import os
import tempfile
from pathlib import Path

from llama_adapter.runtime.errors import GraphError


def check_place(target: Path, *, shown: str) -> None:
    """Raise GraphError, before the work, where no file can be made at `target`; nothing is left behind."""
    folder = next(parent for parent in Path(os.path.abspath(target)).parents if parent.exists())
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        os.rmdir(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=folder))
    except OSError as error:
        raise GraphError(f"`{shown}` cannot be written: {error.strerror}", hint="name another place as --out") from None
