"""Detects that another program removed, moved, replaced or changed a file of records during a run."""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llama_adapter.runtime.atomic_write import sync_folder
from llama_adapter.runtime.locking import take_lock
from llama_adapter.runtime.record_lines import RecordFileError

_GO_ON = "the same command, without --overwrite, goes on where this one ended"


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

    A removed file is written again to `place`, the resolved `path` at the time of opening, if nothing is there now.
    """
    is_there = is_at(path, file)
    if is_there is None:
        return
    if not has_name(file):
        raise _removed(file, path=path, place=place)
    if not is_there:
        raise RecordFileLostError(
            f"`{path}` was moved or replaced while this run wrote into it: its {_num_records(file):,} records are "
            f"in {_present_name(file)}",
            hint=f"move that file to where --out names it, or name it as --out; then {_GO_ON}",
        )
    found = os.fstat(file.fileno()).st_size
    if found != num_bytes:
        raise RecordFileLostError(
            f"Another program changed `{path}` while this run wrote into it: it has {found:,} bytes, and should have "
            f"{num_bytes:,}. It is left as it is",
            hint=f"keep other programs from writing there; {_GO_ON}",
        )


def _present_name(file: BinaryIO) -> str:
    with suppress(OSError):
        name = os.readlink(f"/proc/self/fd/{file.fileno()}")
        if is_at(Path(name), file):
            return f"`{name}`"
    return "that file, under another name"


def _removed(file: BinaryIO, *, path: Path, place: Path) -> RecordFileLostError:
    what = f"`{path}` was removed or replaced while this run wrote into it: its {_num_records(file):,} records"
    try:
        with open(place, "xb") as copy:
            take_lock(copy)
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            file.seek(0)
            shutil.copyfileobj(file, copy, 2**20)
            copy.flush()
            os.fsync(copy.fileno())
        sync_folder(place.parent)
    except OSError as error:
        return RecordFileLostError(
            f"{what} could not be written there again ({error.strerror})",
            hint="find the program that removed it; the same command asks again what is missing there",
        )
    return RecordFileLostError(f"{what} were written there again", hint=f"find the program that removed it; {_GO_ON}")


def _num_records(file: BinaryIO) -> int:
    file.seek(0)
    return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
