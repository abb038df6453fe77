"""Detects that another program removed, moved, replaced or changed a file of records during a run, and saves it."""

import itertools
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llama_adapter.runtime.atomic_write import sync_folder
from llama_adapter.runtime.partial import create_partial
from llama_adapter.runtime.record_lines import RecordFileError

_GO_ON = "the same command, without --overwrite, goes on where this one ended"
_MOVE_BACK = f"move that file to where --out names it, or name it as --out; then {_GO_ON}"


class RecordFileLostError(RecordFileError):
    """The file that a run writes to is no longer at the path that the user named. `hint` says what to do."""


def is_at(path: Path, file: BinaryIO) -> bool | None:
    """Whether a path leads to this open file; None if the system cannot tell."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None


def has_name(file: BinaryIO) -> bool:
    """Whether an open file has a name in some folder."""
    return os.fstat(file.fileno()).st_nlink > 0


def is_standard_output(file: BinaryIO) -> bool:
    """Whether an open file is also stdout or stderr of this process, which receive other output too."""
    here = os.fstat(file.fileno())
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(here, os.fstat(descriptor)):
                return True
    return False


def check_file(file: BinaryIO, *, path: Path, place: Path, num_bytes: int) -> None:
    """Raise `RecordFileLostError` unless `path` leads to the open file and the file has `num_bytes` bytes.

    `place` is the resolved `path` at the time of opening. A removed file is written to `place` again; if that name is
    taken, to another name in the same folder; if the folder is gone, to the nearest existing parent folder.
    """
    is_there = is_at(path, file)
    if is_there is None:
        return
    if not has_name(file):
        raise _removed(file, path=path, place=place)
    if not is_there:
        raise _moved(file, path=path)
    found = os.fstat(file.fileno()).st_size
    if found != num_bytes:
        raise RecordFileLostError(
            f"Another program changed `{path}` while this run wrote into it: it has {found:,} bytes, and should have "
            f"{num_bytes:,}. It is left as it is",
            hint=f"keep other programs from writing there; {_GO_ON}",
        )


def _moved(file: BinaryIO, *, path: Path) -> RecordFileLostError:
    name = Path(f"/proc/self/fd/{file.fileno()}")
    with suppress(OSError):
        name = name.readlink()
    where = (
        f"in `{name}`" if is_at(name, file) and name.parts[:2] != ("/", "proc") else "in that file, under another name"
    )
    return RecordFileLostError(
        f"`{path}` was moved or replaced while this run wrote into it: its {_num_records(file):,} records are {where}",
        hint=_MOVE_BACK,
    )


def _removed(file: BinaryIO, *, path: Path, place: Path) -> RecordFileLostError:
    num_records = _num_records(file)
    what = f"`{path}` was removed or replaced while this run wrote into it: its {num_records:,} records"
    try:
        kept = _write_again(file, place=place)
    except OSError as error:
        return RecordFileLostError(
            f"{what} are lost, since they could not be written again ({error.strerror})",
            hint="find the program that removed it; the same command asks everything again",
        )
    if kept == place:
        return RecordFileLostError(
            f"{what} were written there again", hint=f"find the program that removed it; {_GO_ON}"
        )
    return RecordFileLostError(f"{what} were written to `{kept}`", hint=_MOVE_BACK)


def _write_again(file: BinaryIO, *, place: Path) -> Path:
    """Write a removed file again, completely or not at all, and never over another file; returns its path."""
    folder = next(folder for folder in place.parents if folder.is_dir())
    others = (f"{place.stem}.rescued-{number}{place.suffix}" for number in itertools.count(1))
    names = itertools.chain([place.name], others) if folder == place.parent else others
    copy = create_partial(folder / place.name, is_private=True)
    beside = Path(copy.name)
    try:
        with copy:
            file.seek(0)
            shutil.copyfileobj(file, copy, 2**20)
            copy.flush()
            os.fsync(copy.fileno())
            if folder == place.parent:
                os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        kept = next(folder / name for name in names if _takes_name(beside, folder / name))
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()
    sync_folder(folder)
    return kept


def _takes_name(file: Path, name: Path) -> bool:
    """Give a file this name; False if the name is taken."""
    try:
        os.link(file, name)
    except FileExistsError:
        return False
    except OSError:  # the file system has no links
        if os.path.lexists(name):
            return False
        file.rename(name)
    return True


def _num_records(file: BinaryIO) -> int:
    file.seek(0)
    return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
