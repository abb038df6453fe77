"""Keeps others out of a Ray cluster that this program starts on this machine: its ports, its token and its folder.

Ray takes all of them from the environment, and its processes inherit it. Other users cannot read it.
"""

import ipaddress
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from llama_adapter.runtime.errors import UsageError

_LOCAL: Final = "local"  # Ray's name for a new cluster on this machine
_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# Without clusters, Ray uses the loopback address for this machine, and all its processes listen there. The name says
# what Ray's authors needed it for; it works on every system.
_CLUSTERS: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_FOLDER: Final = "RAY_TMPDIR"
_LONGEST_FOLDER: Final = 38  # bytes: Ray adds 68 to the path of a socket, and a path has at most 107


@contextmanager
def kept_on_this_machine(address: str) -> Iterator[None]:
    """During the context, a cluster that Ray starts is closed to other machines and other users.

    It listens on loopback only, asks for a random token, and has its files in a private folder. What the user has set
    of Ray's variables for these is kept. With the address of a running cluster the user's variables decide. The only
    change is that Ray does not replace a loopback address by another address of this machine, where a cluster on
    loopback does not listen. Ray must be installed. Raises UsageError if the private folder is not private.
    """
    added = {}
    if (address == _LOCAL or _is_loopback(address)) and not os.environ.get(_CLUSTERS):
        added[_CLUSTERS] = "0"
    if address == _LOCAL:
        if not _has_token():
            added[_TOKEN] = secrets.token_hex(32)
        if not os.environ.get(_MODE):
            added[_MODE] = "token"
        if not os.environ.get(_FOLDER):
            added[_FOLDER] = str(_private_folder())
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    _read_again()
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name)
            if (value := before[name]) is not None:
                os.environ[name] = value
        _read_again()


def _has_token() -> bool:
    """Whether the user has chosen a token, or that there is none.

    A token in the home folder counts only with RAY_AUTH_MODE, because Ray puts one there by itself, and others may be
    able to read it.
    """
    if os.environ.get(_TOKEN) or os.environ.get(_TOKEN_FILE):
        return True
    mode = os.environ.get(_MODE, "").lower()
    return bool(mode) and (mode != "token" or (Path.home() / ".ray" / "auth_token").exists())


def _private_folder() -> Path:
    """A folder for Ray's files that only this user may enter, created if it is missing.

    Ray lets everyone write to the folders of its logs and its sockets, so they have to be inside of such a folder.
    """
    name = f"llama-adapter-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder = Path("/tmp") / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"`{folder}` is open to other users or belongs to one, and Ray's files would be in it",
            hint=f"remove it, or name a private folder with {_FOLDER}",
        )
    return folder


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_again() -> None:
    """Let Ray read the variables again: it keeps what it found when it was imported."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled, without types

    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(_CLUSTERS, "1").lower() in ("1", "true")
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
