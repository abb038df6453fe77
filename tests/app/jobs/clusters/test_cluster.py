"""A Ray cluster that this program starts: other machines cannot reach it, and other users get nothing from it."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from llama_adapter.app.jobs.clusters.cluster import kept_on_this_machine
from llama_adapter.runtime.errors import UsageError
from tests.app.models.parallel.processes import descendants, listening

VARIABLES = (
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    "RAY_NUM_REDIS_GET_RETRIES",
    "RAY_TMPDIR",
)
JOIN = """
import json, os, sys
from llama_adapter.app.jobs.clusters.cluster import RayOptions, WorkersFailedError, joined_cluster

class Worker:
    def pid(self):
        return os.getpid()

try:
    with joined_cluster(RayOptions(address=sys.argv[1] if len(sys.argv) > 1 else None)):
        import ray

        worker = ray.remote(Worker).options(num_cpus=0).remote()
        said = {"worker": ray.get(worker.pid.remote()), "address": ray.get_runtime_context().gcs_address}
        print(json.dumps({**said, "token": os.environ["RAY_AUTH_TOKEN"]}), flush=True)
        sys.stdin.read()
except WorkersFailedError as error:
    print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
"""
# A call of each of Ray's services. A server answers UNIMPLEMENTED for the services that it does not have.
CALLS = {
    "/ray.rpc.NodeInfoGcsService/CheckAlive": "gcs_server",
    "/ray.rpc.NodeManagerService/GetSystemConfig": "raylet",
    "/ray.rpc.ObjectManagerService/Pull": "raylet",
    "/ray.rpc.CoreWorkerService/NumPendingTasks": "worker",
}
# Ray's autoscaler has counters for Prometheus on a port, which asks for no token. It takes no other requests.
ITS_COUNTERS = b"/autoscaler/"


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start a process that joins the cluster at an address, or a new one on this machine."""
    given = {name: value for name, value in os.environ.items() if name not in VARIABLES} | environ
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, *arguments],
        env=given,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ray ends a whole process group, which must not be that of the tests
    )


def said_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


@pytest.fixture(scope="module")
def own() -> Iterator[dict[str, Any]]:
    """A cluster of this machine: what its process has said, and the number of this process."""
    with start() as process:
        try:
            yield {**said_by(process), "process": process.pid}
            process.communicate(timeout=60)
        finally:
            process.kill()


def ports(own: dict[str, Any]) -> list[tuple[int, str, int]]:
    """A process of the cluster, an address and a port, for all on which it listens."""
    pids = [own["process"], *descendants(own["process"])]
    return [(pid, address, port) for pid in pids for address, port in listening(pid)]


def command_of(pid: int) -> bytes:
    with suppress(OSError):  # it has ended meanwhile
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.slow
def test_all_ports_of_a_cluster_of_this_machine_are_on_loopback(own: dict[str, Any]) -> None:
    found = ports(own)

    assert {address for _, address, _ in found} == {"127.0.0.1"}
    commands = {command_of(pid) for pid, _, _ in found}
    for name in (b"/gcs_server", b"/raylet", b"ray::Worker"):
        assert any(name in command for command in commands), name


@pytest.mark.slow
def test_all_ports_ask_for_the_token_except_that_of_the_autoscaler_s_counters(own: dict[str, Any]) -> None:
    services, without = set(), []
    for pid, _, port in ports(own):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            codes = {name: code_of(channel, name) for name in CALLS}
        services |= {name for name, code in codes.items() if code == "UNAUTHENTICATED"}
        if set(codes.values()) == {"UNAVAILABLE"}:  # a server of HTTP
            if status_of(port) != 401:
                without.append(command_of(pid))
                assert status_of(port, b"anything") == 405
        else:
            assert set(codes.values()) == {"UNIMPLEMENTED", "UNAUTHENTICATED"}, command_of(pid)

    assert services == set(CALLS)
    assert all(ITS_COUNTERS in command for command in without), without
    assert len(without) <= 1


def code_of(channel: grpc.Channel, name: str) -> str:
    try:
        channel.unary_unary(name)(b"", timeout=10)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def status_of(port: int, data: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data=data, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_the_token_is_in_no_command_line_and_ray_s_files_are_private(own: dict[str, Any]) -> None:
    token = own["token"].encode()
    assert len(token) == 64
    pids = descendants(own["process"])
    assert not any(token in command_of(pid) for pid in pids)
    (raylet,) = (command for pid in pids if b"/raylet\0" in (command := command_of(pid)))
    sockets = {Path(word.partition(b"=")[2].decode()) for word in raylet.split(b"\0") if b"socket_name=" in word}
    assert len(sockets) == 2
    for path in sockets:
        assert path.is_socket()
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in path.parents)
    session = next(iter(sockets)).parents[1]
    files = [path for path in session.rglob("*") if path.is_file()]
    assert files
    assert not any(token in path.read_bytes() for path in files)


@pytest.mark.slow
def test_nobody_joins_without_the_token(own: dict[str, Any]) -> None:
    environs: list[dict[str, str]] = [
        {},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        {"RAY_AUTH_MODE": "token", "HOME": "/nonexistent"},
    ]
    strangers = [start(own["address"], **environ) for environ in environs]
    said = [json.loads(stranger.communicate(timeout=120)[0]) for stranger in strangers]

    assert "is unavailable" in said[0]["error"]
    assert "is unavailable" in said[1]["error"]
    assert "needs a token, and none was found" in said[2]["error"]
    assert all("RAY_AUTH_TOKEN" in one["hint"] for one in said)


@pytest.mark.slow
def test_who_has_the_token_joins(own: dict[str, Any]) -> None:
    with start(own["address"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=own["token"]) as friend:
        said = said_by(friend)
        friend.communicate(timeout=60)

    assert (said["address"], said["token"]) == (own["address"], own["token"])
    assert said["worker"] != own["worker"]


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No variables of Ray, and an empty home folder."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def of_ray() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_each_cluster_has_another_token_and_the_environment_is_restored(environ: pytest.MonkeyPatch) -> None:
    before, tokens = of_ray(), []
    for _ in range(2):
        with kept_on_this_machine("local"):
            tokens.append(of_ray()["RAY_AUTH_TOKEN"])
            assert of_ray()["RAY_AUTH_MODE"] == "token"
        assert of_ray() == before
    assert len(set(tokens)) == 2


@pytest.mark.parametrize(
    "chosen",
    [
        {"RAY_AUTH_TOKEN": "mine"},
        {"RAY_AUTH_TOKEN_PATH": "/etc/mine"},
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"},
    ],
)
def test_what_the_user_chose_is_kept(environ: pytest.MonkeyPatch, chosen: dict[str, str]) -> None:
    for name, value in {**chosen, "RAY_TMPDIR": "/mine", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}.items():
        environ.setenv(name, value)
    before = of_ray()
    with kept_on_this_machine("local"):
        assert of_ray() == {"RAY_AUTH_MODE": "token", **before}
    assert of_ray() == before


def test_a_token_in_the_home_folder_counts_if_the_user_asks_for_tokens(
    environ: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("mine")
    with kept_on_this_machine("local"):
        assert "RAY_AUTH_TOKEN" in of_ray(), "Ray may have written the file"
    environ.setenv("RAY_AUTH_MODE", "token")
    with kept_on_this_machine("local"):
        assert "RAY_AUTH_TOKEN" not in of_ray()


@pytest.mark.parametrize("address", ["head:6379", "192.0.2.1:6379", "auto"])
def test_no_variable_changes_for_a_cluster_that_runs(environ: pytest.MonkeyPatch, address: str) -> None:
    before = of_ray()
    with kept_on_this_machine(address):
        assert of_ray() == before


@pytest.mark.parametrize(
    ("address", "chosen", "read", "tries"),
    [
        ("head:6379", None, 20, 4),
        ("127.0.0.1:6379", None, 20, 4),
        ("local", None, 60, 60),
        ("head:6379", "7", 7, 7),
        ("local", "7", 7, 7),
    ],
)
def test_a_running_cluster_is_tried_four_times_unless_the_user_sets_the_number(
    environ: pytest.MonkeyPatch, address: str, chosen: str | None, read: int, tries: int
) -> None:
    from ray._private import ray_constants

    environ.setattr(ray_constants, "NUM_REDIS_GET_RETRIES", read)  # as Ray has read it when it was imported
    if chosen is not None:
        environ.setenv("RAY_NUM_REDIS_GET_RETRIES", chosen)
    with kept_on_this_machine(address):
        assert tries == ray_constants.NUM_REDIS_GET_RETRIES
    assert read == ray_constants.NUM_REDIS_GET_RETRIES


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "localhost:6379", "[::1]:6379"])
def test_a_cluster_on_loopback_is_looked_for_there(environ: pytest.MonkeyPatch, address: str) -> None:
    from ray._private.services import canonicalize_bootstrap_address

    with kept_on_this_machine(address):
        assert canonicalize_bootstrap_address(address) == f"127.0.0.1:{address.rpartition(':')[2]}"


def test_a_folder_that_others_may_enter_is_refused(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.setattr("tempfile.gettempdir", lambda: "/" + "long" * 20)
    environ.setattr("os.getuid", lambda: 2**31)  # of nobody
    folder = Path(f"/tmp/llama-adapter-{2**31}")
    try:
        with pytest.raises(UsageError, match="open to other users"), kept_on_this_machine("local"):
            pass
    finally:
        folder.rmdir()
    folder.symlink_to("/nonexistent")
    try:
        with pytest.raises(UsageError, match="open to other users"), kept_on_this_machine("local"):
            pass
    finally:
        folder.unlink()
