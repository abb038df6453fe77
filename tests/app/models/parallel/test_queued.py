"""Ranks whose collectives run in a device's queue, like those of NCCL and HCCL, which report no failure to the host."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama_adapter import Captioner
from llama_adapter.app.models.parallel import group as group_module
from llama_adapter.app.models.parallel import rendezvous, watch
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.parallel.launch import Launched
from llama_adapter.app.models.parallel.watch import StepWatch
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.devices.collectives import LIBRARIES
from tests.fakes import nccl

SAMPLES = sorted(sample_pictures().glob("*.png"))[:6]


@pytest.fixture
def host_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> nccl.HostNccl:
    fake = nccl.HostNccl()
    fake.install(monkeypatch)
    monkeypatch.setattr(group_module, "ENTRY", nccl.ENTRY)
    monkeypatch.setattr(group_module, "LIBRARIES", nccl.collectives.LIBRARIES)
    monkeypatch.setenv(nccl.FATAL, str(tmp_path / "fatal"))
    return fake


@pytest.mark.slow
@pytest.mark.proves("tensor parallelism", "CUDA")
def test_two_ranks_answer_as_one_and_name_one_that_dies_within_a_step(host_nccl: nccl.HostNccl, tmp_path: Path) -> None:
    with Captioner.load(device="cpu", dtype="float32", batch_size=4) as alone:
        expected = [answer.text for answer in alone.generate(SAMPLES)]
    with Captioner.load(device="cuda:0", dtype="float32", batch_size=4, tensor_parallel=2) as captioner:
        assert captioner.info.mode == "eager"  # by default: no graph holds the sums over ranks
        assert [answer.text for answer in captioner.generate(SAMPLES)] == expected
        assert host_nccl.groups == [("nccl", "0")]
        (tmp_path / "fatal").write_text(str(int(signal.SIGKILL)))
        for _ in range(2):
            with pytest.raises(RankError, match=r"^Rank 1 of 2 \(process \d+\) failed: ended by SIGKILL\nhint: "):
                captioner.caption(SAMPLES[0])
    assert host_nccl.aborted.is_set()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("collectives", "kind"), [("nccl", "cuda"), ("hccl", "npu")])
def test_a_rank_chooses_its_device_before_it_joins(
    collectives: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    device = torch.device(kind, 3) if kind == "cuda" else type("Device", (), {"type": kind, "index": 3})()
    module = type("Module", (), {"set_device": staticmethod(lambda given: calls.append(("set_device", given)))})
    monkeypatch.setattr(torch, "get_device_module", lambda given: module)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: calls.append(("zeros", device)) or torch.ones(1))
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **options: calls.append((name, options["rank"], options["timeout"]))
    )
    monkeypatch.setattr(dist, "new_group", lambda **options: calls.append(options["backend"]))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: calls.append("sum"))
    rendezvous.join(
        dist.HashStore(),
        Launched(rank=3, size=4, local_rank=3, is_local=True),
        collectives=collectives,
        timeout_s=7,
        device=device,  # type: ignore[arg-type]
    )
    assert calls == [
        ("set_device", device),
        (collectives, 3, rendezvous.timedelta(seconds=7)),
        "gloo",
        ("zeros", device),
        "sum",
    ]


def test_the_libraries_get_the_time_limit_where_they_have_one() -> None:
    assert LIBRARIES["gloo"].variables(60) == {}
    assert LIBRARIES["nccl"].variables(60) == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    for given, connect, execute in ((0.5, "120", "1"), (300.2, "301", "301"), (1e6, "7200", "17340")):
        assert LIBRARIES["hccl"].variables(given) == {
            "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
            "HCCL_CONNECT_TIMEOUT": connect,
            "HCCL_EXEC_TIMEOUT": execute,
        }


class Step:
    """A wait for the device, and the watch that supervises it."""

    def __init__(self) -> None:
        self.failure: RankError | None = None
        self.stalled: list[float] = []
        self.num_calls = 0
        self.given_up = threading.Event()
        self.watch = StepWatch(find=self._find, progress=lambda: self.num_calls, release=self.given_up.set)

    def _find(self, stalled_s: float) -> RankError | None:
        self.stalled.append(stalled_s)
        return self.failure


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    monkeypatch.setattr(watch, "_POLL_S", 0.001)
    step = Step()
    yield step
    step.watch.close()


def test_what_a_device_gives_after_a_failure_is_not_taken(step: Step) -> None:
    with step.watch.watching():
        pass

    def fail() -> None:
        step.failure = RankError("rank 1 is gone")
        step.given_up.wait()

    def fail_later() -> None:
        raise RuntimeError("the communicator was aborted")

    for body in (fail, fail_later):
        with pytest.raises(RankError, match="rank 1 is gone"), step.watch.watching():
            body()


def test_a_watch_counts_the_time_in_which_nothing_goes_on(step: Step) -> None:
    with step.watch.watching():
        _until(lambda: len(step.stalled) > 20)
        longest = step.stalled[-1]
        step.num_calls += 1
        seen = len(step.stalled)
        _until(lambda: len(step.stalled) > seen + 1)
    assert longest > 0
    assert 0.0 in step.stalled[seen : seen + 2]


def test_a_device_that_does_not_give_up_ends_the_process_with_the_same_words(
    step: Step, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    has_ended = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        has_ended.set()

    def wait_without_end() -> None:
        step.failure = RankError("Rank 1 of 2 failed: ended by SIGKILL", hint="look")
        has_ended.wait()

    monkeypatch.setattr(watch, "_RELEASE_S", 0.001)
    monkeypatch.setattr(watch.os, "_exit", end)
    with pytest.raises(RankError), step.watch.watching():
        wait_without_end()
    assert ended == [1]
    assert capsys.readouterr().err == "error: Rank 1 of 2 failed: ended by SIGKILL\n\nhint: look\n"


def _until(is_true: Any) -> None:
    while not is_true():
        threading.Event().wait(0.001)
