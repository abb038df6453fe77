"""Uploaded files: their private folder, the check that a path is an uploaded file, and reading. Imports no Gradio."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.partial import partial_folder
from llama_adapter.vision.errors import PictureError

MAX_UPLOAD_BYTES = 256 * 2**20  # one file, such as a zip; a further limit applies when pictures are read

_FOLDER_VARIABLES = ("GRADIO_TEMP_DIR", "GRADIO_EXAMPLES_CACHE")  # Gradio serves the files of both


class ForeignFileError(LlamaAdapterError):
    """An event names a file that was not uploaded."""

    http_status = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A file as an event names it. Nothing is checked until it is read."""

    path: str
    name: str  # the name on the user's disk; if a folder was uploaded, with its folders

    @property
    def base_name(self) -> str:
        """The name without folders; / and \\ are separators."""
        return self.name.replace("\\", "/").rstrip("/").rpartition("/")[2] or "picture"


def upload_of(value: Any) -> Upload | None:
    """The file in a component's value as the browser sent it; None if the value is no file.

    It is used with `preprocess=False`, because Gradio's preprocessing opens pictures and saves converted copies.
    """
    if not isinstance(value, dict) or not isinstance(value.get("path"), str):
        return None
    name = value.get("orig_name")
    if not isinstance(name, str) or not name.strip():
        name = os.path.basename(value["path"])
    return Upload(path=value["path"], name=name)


def uploads_of(value: Any) -> list[Upload]:
    """As `upload_of`, for a component with several files."""
    return [file for each in (value if isinstance(value, list) else []) if (file := upload_of(each)) is not None]


def upload_folder() -> Path:
    """Gradio's folder of uploads: that of its environment variable, or one in the system's temporary folder."""
    return Path(os.environ.get(_FOLDER_VARIABLES[0]) or Path(tempfile.gettempdir()) / "gradio")


@contextmanager
def private_uploads() -> Iterator[Path]:
    """A new upload folder that only this user can read, removed at the end. Build and serve the page in this context.

    By default, all Gradio programs of a machine share one folder of uploads. What killed servers left is removed.
    """
    with partial_folder(Path(tempfile.gettempdir()) / "llama-adapter-web") as folder:
        folder.chmod(0o700)
        before = {name: os.environ[name] for name in _FOLDER_VARIABLES if name in os.environ}
        for name, part in zip(_FOLDER_VARIABLES, ("uploads", "examples"), strict=True):
            (folder / part).mkdir()
            os.environ[name] = str(folder / part)
        try:
            yield folder / "uploads"
        finally:
            for name in _FOLDER_VARIABLES:
                del os.environ[name]
            os.environ.update(before)


def uploaded(path: str | None) -> Path | None:
    """The path with all links resolved, or None unless it is a regular file of the upload folder."""
    if not path:
        return None
    try:
        real = Path(os.path.realpath(path))
    except ValueError:  # no file has a name with a null character or half of a surrogate pair
        return None
    folder = os.path.realpath(upload_folder())
    return real if real.is_relative_to(folder) and os.path.isfile(real) else None


def read_upload(path: str, *, name: str, max_bytes: int) -> bytes:
    """The bytes of an uploaded file, called `name` in messages.

    Raises PictureError if the file is gone, was not uploaded, or is larger than `max_bytes`.
    """
    if (real := uploaded(path)) is None:
        raise PictureError("missing", f"`{name}` is no longer on the server; add it again.")
    try:
        with real.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise PictureError("unreadable", f"`{name}` cannot be read ({error.strerror}); add it again.") from error
    if len(data) > max_bytes:
        raise PictureError("too_large", f"Wanted at most {max_bytes:,} bytes, but `{name}` has more; make it smaller.")
    return data


def place_in_uploads(path: Path) -> str:
    """Copy one of the server's own files into the folder of uploads; returns the path. Equal files share a copy."""
    data = path.read_bytes()
    copy = upload_folder() / hashlib.sha256(data).hexdigest() / path.name
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
    return str(copy)


def refuse_foreign_files(payload: Any) -> None:
    """Raise ForeignFileError if the values of an event name a file that was not uploaded, or a URL as a file."""
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
