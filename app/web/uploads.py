"""The one folder whose files the page reads: what users uploaded, and the sample pictures copied there. No Gradio."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.vision.errors import PictureError

_FOLDER_VARIABLES = ("GRADIO_TEMP_DIR", "GRADIO_EXAMPLES_CACHE")  # the second one's files would be served as well


class ForeignFileError(LlamaAdapterError):
    """An event names a file that was not uploaded."""

    http_status = 400


def upload_folder() -> Path:
    """Where Gradio puts what is uploaded: by its variable, or else where all its programs do."""
    return Path(os.environ.get(_FOLDER_VARIABLES[0]) or Path(tempfile.gettempdir()) / "gradio")


@contextmanager
def private_uploads() -> Iterator[Path]:
    """A fresh folder for uploads, readable by this user only and removed at the end; build and serve the page inside.

    Without it Gradio keeps them in a folder of the machine's temporary files that all its programs share.
    """
    folder = Path(tempfile.mkdtemp(prefix="llama-adapter-"))
    before = {name: os.environ.get(name) for name in _FOLDER_VARIABLES}
    for name, part in zip(_FOLDER_VARIABLES, ("uploads", "examples"), strict=True):
        (folder / part).mkdir()
        os.environ[name] = str(folder / part)
    try:
        yield folder / "uploads"
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def uploaded(path: str | None) -> Path | None:
    """The path with all links resolved, or None unless it is a regular file of the upload folder."""
    if not path:
        return None
    try:
        real = Path(os.path.realpath(path))
    except ValueError:  # a null character, or half of a character: no file has such a name
        return None
    folder = os.path.realpath(upload_folder())
    return real if real.is_relative_to(folder) and os.path.isfile(real) else None


def read_upload(path: str, *, max_bytes: int) -> bytes:
    """The bytes of an uploaded file. Raises PictureError for one that is gone, foreign, or larger than `max_bytes`."""
    real = uploaded(path)
    if real is None:
        raise PictureError("missing", "The picture is no longer on the server; choose it again.")
    try:
        with real.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        raise PictureError("unreadable", "The uploaded picture could not be read; choose it again.") from None
    if len(data) > max_bytes:
        raise PictureError("too_large", f"Wanted at most {max_bytes:,} bytes, but the file has more; make it smaller.")
    return data


def place_in_uploads(path: Path) -> str:
    """A copy of one of our own files among the uploads, under its own name; equal bytes have one copy."""
    data = path.read_bytes()
    copy = upload_folder() / hashlib.sha256(data).hexdigest() / path.name
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
    return str(copy)


def refuse_foreign_files(payload: Any) -> None:
    """Raise ForeignFileError when an event's values speak of a file that was not uploaded, or is on the web.

    Gradio looks at these paths only in pages that it serves itself, only where a value says that it is a file, and
    it downloads web addresses.
    """
    pending = [payload]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            path = value.get("path")
            if path is not None and not (isinstance(path, str) and uploaded(path)):
                raise ForeignFileError("An event names a file that was not uploaded")
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
