"""Ray, quietly: joins a cluster or starts one on this machine, and leaves it as it was."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llama_adapter.app.scale.options import RayOptions, WorkersFailedError
from llama_adapter.app.scale.places import Machine
from llama_adapter.runtime.errors import UsageError

# Read by Ray when it is imported. What the user has set stays.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker that reserves no device shall not be told there is none
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what happens to machines is printed on stdout, which is for answers
}

_CONNECT_S = 10.0


@contextmanager
def joined_cluster(options: RayOptions) -> Iterator[str]:
    """Within it, Ray can be used; gives a line that says which cluster it is.

    A cluster that this process had joined before stays joined. Raises UsageError where Ray is not installed and
    WorkersFailedError where the cluster cannot be had.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(
            f"--engine ray needs the package ray, and {_missing(error)}",
            hint="pip install --editable '.[ray]'",
        ) from error
    if ray.is_initialized():
        _quieten()
        yield _described(address="joined before")
        return
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        _check_reachable(address)
        ray.init(
            address=address,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise WorkersFailedError(
            f"The Ray cluster at {address} cannot be had: {' '.join(str(error).split())}",
            hint="see whether it runs (`ray status`) and is of the same version, or leave --ray-address out",
        ) from error
    try:
        _quieten()
        yield _described(address="on this machine" if address == "local" else f"at {address}")
    finally:
        ray.shutdown()


def machines() -> list[Machine]:
    """Those of the cluster that are alive now."""
    import ray

    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [Machine(id=node["NodeID"], resources=dict(node["Resources"])) for node in found if node["Alive"]]


def _check_reachable(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _described(*, address: str) -> str:
    import ray

    alive = machines()
    number = "1 machine" if len(alive) == 1 else f"{len(alive)} machines"
    return f"Ray {ray.__version__} {address}: {number}"


def _quieten() -> None:
    """What ends a job is told in one sentence; Ray's own logs of it stay in its files."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _missing(error: ImportError) -> str:
    return f"{error.name} is missing" if error.name else str(error)
