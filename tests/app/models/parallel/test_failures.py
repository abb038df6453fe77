"""Failures of a rank at rendezvous, loading or computing: one sentence names it, and no process is left behind."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama_adapter import Captioner, __version__
from llama_adapter.app.models.parallel import group as group_module
from llama_adapter.app.models.parallel import rank_process, rendezvous
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.parallel.group import RankGroup
from llama_adapter.app.models.parallel.launch import LOOPBACK, Launched, launched
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.child_process import ChildProcess
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.problems import describe
from tests.app.command import Run
from tests.app.models.parallel.processes import listening

ROOT = Path(__file__).parents[4]
SAMPLES = sorted(sample_pictures().glob("*.png"))[:6]
LONG = "What is this? " * 60


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rank processes that were started."""
    started: list[Any] = []

    class Child(group_module.ChildProcess):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.process)

    monkeypatch.setattr(group_module, "ChildProcess", Child)
    return started


def starve(process: int) -> None:
    """Limit a process to the memory that it has now."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    resource.prlimit(process, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))


def assert_ended(processes: list[Any]) -> None:
    assert processes
    assert all(process.poll() is not None for process in processes)
    assert not dist.is_initialized()


def starving(descriptor: str, started: str) -> None:
    """A rank process that gets no more memory when it begins to load. Earlier, while it joins, it needs some."""
    stream = rank_process.stream_model

    def starved(*arguments: Any, **options: Any) -> Any:
        starve(os.getpid())
        return stream(*arguments, **options)

    rank_process.stream_model = starved
    rank_process.main(descriptor, started)


@pytest.mark.slow
def test_a_rank_without_memory_for_its_share_is_named(processes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "ENTRY", f"{__name__}:{starving.__name__}")
    with pytest.raises(RankError, match=r"^Rank 1 of 2 \(process \d+\) failed: The memory is not enough") as caught:
        Captioner.load(tensor_parallel=2)
    assert describe(caught.value).exit_code == ExitCode.FAILED
    assert_ended(processes)


@pytest.mark.slow
def test_ranks_that_find_no_way_to_each_other_say_so_and_one_without_memory_for_a_step_is_named(
    processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
        patch.setattr(group_module, "_NAMING_S", 0.1)
        with pytest.raises(RankError, match=r"^The 2 ranks of the decoder cannot reach each other: .*nosuch0"):
            Captioner.load(tensor_parallel=2)
    assert_ended(processes)
    with Captioner.load(tensor_parallel=2, batch_size=6) as captioner:
        assert captioner.caption(SAMPLES[0]).error is None, "others can meet after that"
        starve(processes[-1].pid)
        with pytest.raises(RankError, match=r"^Rank 1 of 2 \(process \d+\) failed: The memory is not enough"):
            captioner.generate(SAMPLES, LONG)
    assert_ended(processes)


def test_an_error_of_the_first_rank_is_named() -> None:
    group = RankGroup.__new__(RankGroup)
    group.size, group._children, group._step_watch = 2, {}, None
    failure = group.explain(ZeroDivisionError("division by zero"))
    assert failure.message == "Rank 0 of 2 failed: Unexpected ZeroDivisionError: division by zero"


class Ended(ChildProcess):
    """A rank that has ended with an exit code, or runs (None)."""

    def __init__(self, code: int | None) -> None:
        self.process: Any = SimpleNamespace(returncode=code, poll=lambda: code, wait=lambda timeout: code)


BY_SIGKILL = "ended by SIGKILL"


@pytest.mark.parametrize(
    ("codes", "errors", "failure"),
    [
        ([None, -9, None], {}, (2, BY_SIGKILL)),
        ([rendezvous.SECONDARY, -9, rendezvous.SECONDARY], {}, (2, BY_SIGKILL)),
        ([3, -9, None], {}, (2, BY_SIGKILL)),
        ([rendezvous.SECONDARY, None, 3], {}, (3, "ended with exit code 3")),
        ([-9, None, 1], {3: "The disk is full."}, (3, "The disk is full.")),
        ([rendezvous.SECONDARY, None, None], {}, None),
    ],
)
def test_the_rank_that_failed_first_is_named(
    codes: list[int | None], errors: dict[int, str], failure: tuple[int, str] | None
) -> None:
    """Reported errors come before signals, and signals before exit codes. `SECONDARY` is the end after another's."""
    group = RankGroup.__new__(RankGroup)
    group._children = {rank: Ended(code) for rank, code in enumerate(codes, start=1)}
    group._seen = dist.HashStore()
    for rank, sentence in errors.items():
        group._seen.set(rendezvous.error_key(rank), json.dumps({"sentence": sentence, "hint": "Make room."}))
    found = group._failure_of({1, 2, 3})
    assert (found and found[:2]) == failure


@pytest.mark.parametrize("name", ["llama-adapter", "torch"])
def test_a_rank_of_another_version_is_refused_before_any_group_is_joined(name: str) -> None:
    group = RankGroup.__new__(RankGroup)
    group.size, group._children, group._seen = 2, {1: Ended(None)}, dist.HashStore()
    versions = {"llama-adapter": __version__, "torch": torch.__version__}
    group._seen.set("hello/1", json.dumps({**versions, name: "9.9"}))
    said = rf"^Rank 1 of 2 runs {name} 9\.9, and rank 0 runs {name} {re.escape(versions[name])}\nhint: install the same"
    with pytest.raises(RankError, match=said):
        group._join(CaptionerSpec(tensor_parallel=2))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


def launch(monkeypatch: pytest.MonkeyPatch, rank: int, *, address: str, port: int) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_ADDR", address), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


COMMAND = ("caption", str(SAMPLES[0]), "--tensor-parallel", "2", "--parallel-timeout", "1")
NOBODY = "did not meet the others at {address}, port {port}, within 1 s: "
TAKEN = "cannot listen on port {port}, which MASTER_PORT names: it is taken\n\nhint: set "


@pytest.mark.parametrize(
    ("rank", "address", "is_taken", "told"),
    [
        (0, "127.0.0.1", True, TAKEN),
        (0, "127.0.0.1", False, NOBODY),
        (1, "nowhere.invalid", True, NOBODY),
        (1, "127.0.0.1", True, f"{NOBODY}the server there does not answer"),  # torch alone would wait forever
    ],
)
def test_a_taken_port_a_wrong_name_and_a_silent_server_are_told(
    rank: int, address: str, is_taken: bool, told: str, run: Run, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = taken if is_taken else free_port()
    launch(monkeypatch, rank, address=address, port=port)
    monkeypatch.setattr(rendezvous, "_SPARE_S", 0.5)
    ran = run(*COMMAND)
    assert ran.code == ExitCode.FAILED
    assert f"error: Rank {rank} of 2 {told.format(address=address, port=port)}" in ran.err


def test_ranks_of_torchrun_meet_before_an_unknown_model_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others wait for this rank until their time is over."""
    port = free_port()
    launch(monkeypatch, 0, address="127.0.0.1", port=port)
    assert NOBODY.format(address="127.0.0.1", port=port) in run(*COMMAND, "--model", "nonsense").err


@pytest.mark.slow
def test_a_rank_that_meets_nobody_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in a separate process, because torch's loggers write to its stderr."""
    port = free_port()
    launch(monkeypatch, 1, address="127.0.0.1", port=port)
    ran = subprocess.run([sys.executable, "-m", "llama_adapter", *COMMAND], capture_output=True, text=True, cwd=ROOT)
    error, hint = ran.stderr.rstrip("\n").split("\n\n")
    assert ran.returncode == ExitCode.FAILED
    assert error.startswith(f"error: Rank 1 of 2 {NOBODY.format(address='127.0.0.1', port=port)}")
    assert "MASTER_ADDR and MASTER_PORT" in hint
    assert "\n" not in error + hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_PORT": None}, "The environment has RANK, WORLD_SIZE, MASTER_ADDR, and lacks MASTER_PORT"),
        ({"WORLD_SIZE": None}, "and lacks WORLD_SIZE"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be a whole number from 1 to 65535, got '99999'"),
        ({"RANK": "2"}, "RANK must be a whole number from 0 to 1, got '2'"),
        ({"RANK": "x"}, "RANK must be a whole number from 0 to 1, got 'x'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK must be"),
        ({"WORLD_SIZE": "3"}, "torchrun started 3 processes, and --tensor-parallel is 2"),
    ],
)
def test_variables_that_are_set_in_part_or_wrong_are_refused(
    change: dict[str, str | None], words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every process would answer all pictures."""
    launch(monkeypatch, 0, address="127.0.0.1", port=29500)
    for name, value in change.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    ran = run(*COMMAND)
    assert ran.code == ExitCode.USAGE
    assert words in ran.err


@pytest.mark.parametrize(
    ("change", "is_local", "device"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, True, "npu:3"),
        ({"MASTER_ADDR": "host0", "LOCAL_WORLD_SIZE": "2"}, True, "npu:3"),
        ({"MASTER_ADDR": "host0", "LOCAL_WORLD_SIZE": "1"}, False, "npu:2"),
        ({"MASTER_ADDR": "host0"}, False, "npu:2"),  # a machine has one rank, unless LOCAL_RANK says otherwise
        ({"MASTER_ADDR": "host0", "LOCAL_RANK": "1"}, False, "npu:3"),
        ({"WORLD_SIZE": "1"}, None, None),  # a single process has no ranks
        ({"RANK": "", "WORLD_SIZE": ""}, None, None),
    ],
)
def test_ranks_of_one_machine_are_told_from_those_of_several(
    change: dict[str, str], is_local: bool | None, device: str | None
) -> None:
    place = launched({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", **change})
    assert (place and place.is_local) is is_local
    assert (place and rendezvous.device_of(place, "npu:2")) == device
    group = RankGroup.__new__(RankGroup)
    group._backend, group._children, group._place = CpuBackend(), {}, place  # type: ignore[assignment]
    assert place is None or group.share_memory == is_local


def test_the_store_of_ranks_on_this_machine_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for address in LOOPBACK:
        launch(monkeypatch, 0, address=address, port=port)
        place = Launched(rank=0, size=1, local_rank=0, is_local=True)
        store = rendezvous.environment_store(place, timeout_s=10)
        assert [address for address, taken in listening(os.getpid()) if taken == port] == ["127.0.0.1"]
        del store


def test_variables_are_those_of_before_once_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "9")
    with rendezvous._environment({"GLOO_SOCKET_IFNAME": "lo", "HCCL_EXEC_TIMEOUT": "60"}):
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["HCCL_EXEC_TIMEOUT"]) == ("lo", "9")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["HCCL_EXEC_TIMEOUT"] == "9"
