"""One file at an address: fetched into the user's cache, in one piece or in several, and checked by its SHA-256."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from llama_adapter.app.models.named.source import Check, DownloadError, Missing, http_client, require_space
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.locking import awaited_lock
from llama_adapter.runtime.partial import named_after
from llama_adapter.runtime.terminal.stderr_lines import say_count
from llama_adapter.runtime.user_cache import cache_folder

TIMEOUT_S: Final = 30.0  # to connect, and for the next bytes
WAITS_S: Final = (1.0, 2.0, 4.0, 8.0)  # before attempts that follow one that brought no byte
_MB: Final = 10**6
_LATER = (408, 425, 429, 500, 502, 503, 504)  # statuses after which a server may answer later


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSource:
    """A file at an address, with the SHA-256 that its authors publish."""

    url: str
    sha256: str
    bytes: int | None = None  # about; None: not known
    page: str  # where people find it

    @property
    def name(self) -> str:
        """The name of the file, here and there."""
        return self.url.rpartition("/")[2]

    def folder(self) -> Path:
        """The folder that the file is fetched into. Raises OSError if the user's cache cannot be used."""
        return cache_folder() / "weights"

    def here(self) -> Path | None:
        """The file on this machine."""
        place = self.folder() / self.name
        return place if place.is_file() else None

    def missing(self) -> Missing:
        """What is to be fetched. The server is asked for an unknown size. Raises DownloadError."""
        if self.bytes is not None:
            return Missing(bytes=self.bytes)
        with _errors(self):
            answer = http_client().head(self.url, timeout=TIMEOUT_S, follow_redirects=True)
            _raise_for(answer.status_code, self)
            length = answer.headers.get("content-length", "")
        return Missing(bytes=int(length) if length.isdecimal() else None)

    def fetch(self, *, tell: Callable[[str], None]) -> Path:
        """Fetch the file; its path. A second process waits, and takes the file of the first.

        What an interrupted process left is continued where the server allows it. Raises DownloadError, and OSError.
        """
        place = self.folder() / self.name
        place.parent.mkdir(exist_ok=True)
        with awaited_lock(place.with_name(place.name + ".lock"), waits=lambda: tell(f"waiting for `{place.name}`")):
            if place.is_file():
                return place
            part = place.with_name(place.name + ".part")
            with named_after(part), part.open("ab") as file:
                _fetch(self, file)
                file.flush()
                os.fsync(file.fileno())
            if (found := file_digest(part)) != self.sha256:
                part.unlink()
                raise DownloadError(
                    f"`{self.url}` brought a file with the SHA-256 {found}, and {self.sha256} was published",
                    hint=f"get it again; if the digest stays, compare it with what {self.page} says",
                )
            os.replace(part, place)
        return place

    def check(self) -> Iterator[Check]:
        """Compare the file with its digest. Raises OSError."""
        place = self.here()
        if place is None:
            yield Check(path=self.folder() / self.name, fault="missing")
            return
        yield Check(path=place, fault="" if file_digest(place) == self.sha256 else "not the published SHA-256")


def _fetch(source: FileSource, file: BinaryIO) -> None:
    """Append what is missing to `file`. Raises DownloadError after several attempts that brought nothing."""
    waits = list(WAITS_S)
    while True:
        start = file.tell()
        try:
            with _errors(source):
                _fetch_once(source, file)
                return
        except DownloadError as error:
            if file.tell() > start:
                waits = list(WAITS_S)
            if not isinstance(error, _LaterError) or not waits:
                raise
            time.sleep(waits.pop(0))


def _fetch_once(source: FileSource, file: BinaryIO) -> None:
    headers = {"Accept-Encoding": "identity", "User-Agent": "llama-adapter"}
    if start := file.tell():
        headers["Range"] = f"bytes={start}-"
    with http_client().stream("GET", source.url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as answer:
        if answer.status_code == 416:  # what is here is not the beginning of the file, or all of it: the digest decides
            total = answer.headers.get("content-range", "").rpartition("/")[2]
            if total == str(start):
                return
            _empty(file)
            raise _LaterError(f"`{source.url}` has no bytes after {start:,}")
        _raise_for(answer.status_code, source)
        if answer.status_code != 206:  # the server sends the whole file
            _empty(file)
            start = 0
        length = answer.headers.get("content-length", "")
        total = start + int(length) if length.isdecimal() else None
        if total is not None:
            require_space(Path(file.name).parent, total - start)
        shown = -1
        for piece in answer.iter_raw():
            file.write(piece)
            if total is not None and (done := -(-file.tell() // _MB)) > shown:
                say_count(shown := done, -(-total // _MB), f"MB of {source.name}")
        if total is not None and file.tell() < total:
            raise _LaterError(f"`{source.url}` ended after {file.tell():,} of {total:,} bytes")


def _empty(file: BinaryIO) -> None:
    file.truncate(0)
    file.seek(0)


class _LaterError(DownloadError):
    """A failure that another attempt may not meet."""


def _raise_for(status: int, source: FileSource) -> None:
    if status < 400:
        return
    kind = _LaterError if status in _LATER else DownloadError
    raise kind(
        f"`{source.url}` was answered with status {status}",
        hint=f"look at {source.page} whether it moved, and put a copy at `{source.folder() / source.name}`",
    )


@contextmanager
def _errors(source: FileSource) -> Iterator[None]:
    """Turns errors of the HTTP client into those of this package."""
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise DownloadError(
            f"`{source.url}` is to be fetched, and HF_HUB_OFFLINE forbids it",
            hint=f"unset the variable, or put a copy at `{source.folder() / source.name}`",
        ) from None
    except HTTPError as error:
        reason = str(error) or type(error).__name__
        raise _LaterError(f"`{source.url}` could not be fetched: {reason}") from error
