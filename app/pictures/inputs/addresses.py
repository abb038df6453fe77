"""Pictures at addresses such as s3://, gs://, hdfs:// and file://, read through Arrow's file systems."""

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from llama_adapter.app.pictures.inputs.folders import has_picture_suffix, natural_key
from llama_adapter.app.pictures.inputs.items import InputsError, PictureInput
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.files import DEFAULT_MAX_BYTES

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(name: object) -> bool:
    """Whether a name is an address. An existing local file with this name takes precedence."""
    return isinstance(name, str) and ADDRESS.match(name) is not None and not os.path.lexists(name)


def address_label(address: str) -> str:
    """An address for records: without user name, password and query, which may be secret."""
    try:
        parts = urlsplit(address)
    except ValueError:  # a bracket that is part of no IPv6 address
        return re.sub(r"(?<=://)[^/]*@", "", address.partition("?")[0])
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{unquote(parts.path, errors='surrogateescape')}"


def shown_address(address: str) -> str:
    """An address for messages: as `address_label`, with control characters escaped."""
    return shown_name(address_label(address))


def check_remote(address: str) -> None:
    """Raise InputsError if no installed package reads this kind of storage."""
    try:
        _storage(_root(address))
    except (ImportError, ValueError) as error:
        raise InputsError(
            f"Wanted pictures from `{shown_address(address)}`, but nothing here reads `{urlsplit(address).scheme}`: "
            f"{first_line(error)}",
            hint="what Arrow reads (s3, gs, abfs, hdfs, file) needs no package, others one for fsspec, such as adlfs",
        ) from error
    except OSError:
        return  # the storage is unreachable now; each picture gets this error when it is read


def remote_inputs(address: str, *, recursive: bool) -> Iterator[PictureInput]:
    """The file at an address, or the pictures in the folder at this address, in natural order.

    A folder that cannot be listed or has no pictures gives one item with an error. A missing file or folder gives one
    item, and reading it gives the error.
    """
    label = address_label(address)
    shown = shown_name(label)
    try:
        names = _pictures_below(address, recursive=recursive)
    except FileNotFoundError:
        names = None  # reading it gives the error
    except (OSError, ValueError) as error:
        message = f"Wanted to list `{shown}`, but its storage says: {first_line(error)}."
        yield PictureInput.failed(label, "unreadable", message, source=address)
        return
    if names is None:
        yield PictureInput(source=address, label=label)
        return
    if not names:
        message = f"Wanted pictures in `{shown}`, but there are none; --recursive looks into its folders too."
        yield PictureInput.failed(label, "not_a_file", message, source=address)
    for name in names:
        inner = _joined(address, name)
        yield PictureInput(source=inner, label=address_label(inner), found_in=(label,))


def read_remote(address: str, *, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """The bytes of a file. Raises `PictureError` if it is unreadable or above `max_bytes`."""
    shown = shown_address(address)
    try:
        storage, path = _located(address)
        with storage.open_input_stream(path, compression=None) as stream:
            data = bytes(stream.read(max_bytes + 1))
    except FileNotFoundError:
        raise PictureError("missing", f"Wanted a picture at `{shown}`, but there is nothing of that name.") from None
    except (OSError, ValueError, ImportError) as error:
        raise PictureError(
            "unreadable", f"Wanted to read `{shown}`, but its storage says: {first_line(error)}."
        ) from error
    if len(data) > max_bytes:
        raise PictureError(
            "too_large",
            f"Wanted at most {max_bytes:,} bytes, but `{shown}` has more; make it smaller or raise the limit.",
        )
    return data


def _pictures_below(address: str, *, recursive: bool) -> list[str] | None:
    """Names of the pictures in a folder, relative to the address; None for a file."""
    from pyarrow.fs import FileSelector, FileType

    storage, path = _located(address)
    kind = storage.get_file_info(path).type
    if kind == FileType.NotFound:
        raise FileNotFoundError(address)
    if kind == FileType.File:
        return None
    found = storage.get_file_info(FileSelector(path, recursive=recursive))
    base = path.rstrip("/") + "/"
    names = (entry.path.removeprefix(base) for entry in found if entry.type == FileType.File)
    return sorted((name for name in names if has_picture_suffix(name) and "/." not in f"/{name}"), key=natural_key)


def _located(address: str) -> "tuple[FileSystem, str]":
    """The storage of an address and the path in it. Raises ValueError, ImportError and OSError."""
    storage, base = _storage(_root(address))
    path = unquote(urlsplit(address).path)
    return storage, f"{base.rstrip('/')}/{path.lstrip('/')}".rstrip("/") or "/"


def _root(address: str) -> str:
    """The address of the whole storage. Opening a storage may cost a request, so each storage is opened once."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc, "/" if not parts.netloc else "", parts.query, ""))


@lru_cache(maxsize=64)
def _storage(root: str) -> "tuple[FileSystem, str]":
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    try:
        storage, base = FileSystem.from_uri(root)
    except ValueError:  # Arrow itself does not read this kind
        from fsspec.core import url_to_fs

        inner, base = url_to_fs(root)
        return PyFileSystem(FSSpecHandler(inner)), base
    return storage, base


def _joined(address: str, name: str) -> str:
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/{quote(name)}", parts.query, ""))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a full stop, or its class; Arrow's others are its call stack."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
