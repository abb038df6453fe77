"""Reads picture files as bytes, within limits. Decodes nothing, and imports no Pillow."""

import errno
import os
import stat
from typing import Final

from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.errors import PictureError

DEFAULT_MAX_PIXELS: Final = 128_000_000  # includes the 108-megapixel pictures of phones; about 0.5 GB decoded
DEFAULT_MAX_BYTES: Final = 256 * 2**20


def read_picture_file(
    source: str | os.PathLike[str] | os.PathLike[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> bytes:
    """The content of a regular file of at most `max_bytes`.

    Never waits for a pipe or a device. Raises `PictureError`.
    """
    try:
        path: str | bytes = os.fspath(source)
    except TypeError:
        kind = type(source).__name__
        raise PictureError("unsupported", f"Wanted a path, bytes or a PIL image, got {kind}.") from None
    name = f"`{shown_name(path)}`"
    try:
        _check_regular(os.stat(path), path=path, name=name)
        # The file may be replaced by a pipe after this check, so opening must not block, and the open file is
        # checked again.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            _check_regular(status, path=path, name=name)
            check_bytes(status.st_size, name=name, max_bytes=max_bytes)
            data = file.read(status.st_size + 1)
            if len(data) > status.st_size:  # a growing file, or one of unknown size (/proc)
                data += file.read(max_bytes + 1 - len(data))
    except (FileNotFoundError, NotADirectoryError):
        raise PictureError("missing", f"Wanted a picture file, found no file {name}; check the path.") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise PictureError("missing", f"Wanted a picture file, but the name {name} is too long.") from None
        reason = error.strerror or type(error).__name__
        raise PictureError(
            "unreadable", f"Wanted to read {name}, but the system says: {reason}; check the file and its permissions."
        ) from error
    except ValueError:  # a name that no file can have: with a null character, or not encodable
        raise PictureError("missing", f"Wanted a picture file, but {name} cannot be the name of a file.") from None
    except MemoryError:
        raise out_of_memory(name) from None
    check_bytes(len(data), name=name, max_bytes=max_bytes)
    return data


def _check_regular(status: os.stat_result, *, path: str | bytes, name: str) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        if not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        raise PictureError(
            "not_a_file",
            f"Wanted a picture file, got the folder {name} (folders are replaced by the picture files in them, "
            "and this one has none or is not searched); name a file.",
        )
    raise PictureError("not_a_file", f"Wanted a picture file, but {name} is a pipe, socket or device; name a file.")


def check_bytes(num_bytes: int, *, name: str, max_bytes: int) -> None:
    """Raise `PictureError` for more than `max_bytes`. `name` is used in the message."""
    if num_bytes > max_bytes:
        raise PictureError(
            "too_large",
            f"Wanted at most {max_bytes:,} bytes, but {name} has {num_bytes:,} or more; "
            "make it smaller or raise the limit.",
        )


def out_of_memory(name: str) -> PictureError:
    """The error for a picture that does not fit into memory."""
    return PictureError("too_large", f"There is not enough memory to decode {name}; make it smaller.")
