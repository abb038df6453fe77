"""Joins a Ray cluster or starts one on this machine. Imports Ray when it is needed.

Others are kept out of a cluster that is started here: of its ports, its token and its folder. Ray takes all of them
from the environment, and its processes inherit it. Other users cannot read it.
"""

import importlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from llama_adapter.app.jobs.clusters.places import Machine
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, UsageError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.host_memory import free_host_bytes
from llama_adapter.runtime.problems import Problem
from llama_adapter.runtime.text import counted

# Ray reads these when it is imported. Values that the user has set are kept.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # its log goes to files only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers that reserve no device must still see the devices
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray prints events of machines on stdout, which is for answers
}

_CONNECT_S = 10.0
_ANSWER_S = 30.0  # for a machine to report its free memory


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """The cluster on which a job runs, and the number of captioners."""

    actors: int | None = None  # number of captioners; None: one for every device of the cluster
    address: str | None = None  # HOST:PORT of a running cluster; None: RAY_ADDRESS if set, else only this machine

    def __post_init__(self) -> None:
        require_least(self, "actors")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address must be HOST:PORT of the cluster itself, got {self.address!r}: a job is started on one "
                "of its machines, not through Ray's client"
            )


class WorkersFailedError(LlamaAdapterError):
    """The processes on other machines cannot continue. `hint` says what to do."""


@contextmanager
def joined_cluster(options: RayOptions, *, package: str = "ray", extra: str = "ray") -> Iterator[str]:
    """Join a cluster, or start one, for the duration of the context; yields a line that describes the cluster.

    `package` is the part of Ray that is needed, and `extra` installs it. If this process has joined a cluster before,
    it uses that cluster and does not leave it. Raises UsageError if Ray is not installed, and WorkersFailedError if the
    cluster is unreachable.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray

        importlib.import_module(package)
    except ImportError as error:
        missing = f"{error.name} is missing" if error.name else str(error)
        raise UsageError(f"--engine ray needs the package ray, and {missing}", hint=install_hint(extra)) from error
    if ray.is_initialized():
        _quieten()
        yield _described(address="joined before")
        return
    address = options.address or os.environ.get("RAY_ADDRESS") or _LOCAL
    with _own_sigterm_handler(), kept_on_this_machine(address):
        try:
            _check_reachable(address)
            ray.init(
                address=address,
                include_dashboard=False if address == _LOCAL else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except ray.exceptions.AuthenticationError as error:
            raise WorkersFailedError(
                f"The Ray cluster at {address} needs a token, and none was found",
                hint="put the cluster's token into RAY_AUTH_TOKEN, or the path of its file into RAY_AUTH_TOKEN_PATH",
            ) from error
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise WorkersFailedError(
                f"The Ray cluster at {address} is unavailable: {' '.join(str(error).split())}",
                hint="see whether it runs (`ray status`) and is of the same version, or leave --ray-address out; if it "
                "asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
            ) from error
        try:
            _quieten()
            yield _described(address="on this machine" if address == _LOCAL else f"at {address}")
        finally:
            ray.shutdown()


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM at the end, because Ray sets one and does not remove it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def machines() -> list[Machine]:
    """The machines of the cluster that are alive."""
    import ray

    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [Machine(id=node["NodeID"], resources=dict(node["Resources"])) for node in found if node["Alive"]]


def free_bytes_of(machine_ids: Sequence[str]) -> dict[str, int | None]:
    """The free memory of some machines in bytes, by their ids. A machine that does not answer is missing."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    free = {here: free_host_bytes()} if here in machine_ids else {}
    task = ray.remote(free_host_bytes)
    asked = {
        machine: task.options(num_cpus=0, label_selector={"ray.io/node-id": machine}).remote()
        for machine in machine_ids
        if machine != here
    }
    for machine, answer in asked.items():
        with suppress(ray.exceptions.RayError):
            free[machine] = ray.get(answer, timeout=_ANSWER_S)
    return free


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at the address. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _described(*, address: str) -> str:
    import ray

    return f"Ray {ray.__version__} {address}: {counted(len(machines()), 'machine')}"


def _quieten() -> None:
    """Reduce Ray's logging to errors: errors end a job with one sentence, and Ray's log files have the details."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def raise_problem(problem: Problem, *, host: str) -> NoReturn:
    """Raise an error for a problem on a machine."""
    sentence = f"On {host}: {problem.sentence}"
    if problem.exit_code == ExitCode.USAGE:
        raise UsageError(sentence, hint=problem.hint)
    raise WorkersFailedError(sentence, hint=problem.hint)


_LOCAL: Final = "local"  # Ray's name for a new cluster on this machine
_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# Without clusters, Ray uses the loopback address for this machine, and all its processes listen there. The name says
# what Ray's authors needed it for; it works on every system.
_CLUSTERS: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_FOLDER: Final = "RAY_TMPDIR"
# How often Ray tries to join a running cluster; its default is 20. It tries a wrong token again every second. This also
# limits the tries of a head that answers nothing, and how long Ray waits for the session name, which a head writes when
# it starts: 2 s per try, so 8 s in place of 40 s.
_TRIES: Final = 4
_LONGEST_FOLDER: Final = 38  # bytes: Ray adds 68 to the path of a socket, and a path has at most 107


@contextmanager
def kept_on_this_machine(address: str) -> Iterator[None]:
    """During the context, a cluster that Ray starts is closed to other machines and other users.

    It listens on loopback only, asks for a random token, and has its files in a private folder. What the user has set
    of Ray's variables for these is kept. With the address of a running cluster the user's variables decide. The only
    changes are that Ray tries 4 times to join it, unless the user has set another number, and does not replace a
    loopback address by another address of this machine, where a cluster on loopback does not listen. Ray must be
    installed. Raises UsageError if the private folder is not private.
    """
    from ray._private import ray_constants

    added, tries = {}, ray_constants.NUM_REDIS_GET_RETRIES
    if (address == _LOCAL or _is_loopback(address)) and not os.environ.get(_CLUSTERS):
        added[_CLUSTERS] = "0"
    if address == _LOCAL:
        if not _has_token():
            added[_TOKEN] = secrets.token_hex(32)
        if not os.environ.get(_MODE):
            added[_MODE] = "token"
        if not os.environ.get(_FOLDER):
            added[_FOLDER] = str(_private_folder())
    elif not os.environ.get("RAY_NUM_REDIS_GET_RETRIES"):
        ray_constants.NUM_REDIS_GET_RETRIES = _TRIES
    before = {name: os.environ[name] for name in added if name in os.environ}
    os.environ.update(added)
    _read_again()
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        os.environ.update(before)
        ray_constants.NUM_REDIS_GET_RETRIES = tries
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
