"""The loop of a training: the time left, ranks that join, checkpoints, the log, and damaged or foreign files."""

import math
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from llama_adapter.app.jobs.progress import duration
from llama_adapter.app.learning.training import loop
from llama_adapter.app.learning.training import ranks as module
from llama_adapter.app.learning.training.checkpoint import (
    LoopState,
    TrainingError,
    check_tensors,
    read_checkpoint,
    weight_shapes,
    write_checkpoint,
)
from llama_adapter.app.learning.training.ranks import TrainingRanks, device_name
from llama_adapter.app.learning.training.run_log import COLUMNS, RunLog, read_log
from llama_adapter.app.learning.training.stepping import NamedAdamW
from llama_adapter.app.models.parallel.launch import Launched
from llama_adapter.runtime.errors import CheckpointError

SLOW = {1: 40.0, 2: 9.0, 71: 60.0}  # step -> seconds; the others take one
EVALUATION_S, EVERY, NUM_STEPS = 20.0, 40, 300


def test_the_time_left_is_right_from_the_fifth_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither evaluations nor checkpoints, neither the first steps nor a single slow one distort it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = loop.TrainProgress(visible=False, num_steps=NUM_STEPS, every=EVERY)
    progress.resume(is_evaluated=False)
    clock.now += EVALUATION_S
    progress.resume(is_evaluated=True)
    for done in range(1, NUM_STEPS + 1):
        clock.now += SLOW.get(done, 1.0)
        progress.step(done, loss=1.0, lr=0.1, num_examples=2 if done % EVERY == 0 else 8)
        line = progress.line(done, lr=0.1)
        num_evaluations = sum(step % EVERY == 0 or step == NUM_STEPS for step in range(done, NUM_STEPS + 1))
        left = NUM_STEPS - done + num_evaluations * EVALUATION_S
        assert line.endswith(f", {duration(left)} left") if done >= 5 else "left" not in line, line
        assert progress.seconds == SLOW.get(done, 1.0)
        if done % EVERY == 0:
            clock.now += EVALUATION_S
            progress.resume(is_evaluated=True)
        elif done % 7 == 0:
            clock.now += 5.0  # a checkpoint
            progress.resume(is_evaluated=False)


def test_the_time_left_is_estimated_again_with_a_stage_of_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = loop.TrainProgress(visible=False, num_steps=100, every=None)
    for done in range(1, 51):
        clock.now += 20.0 if done > 40 else 1.0
        progress.step(done, loss=1.0, lr=0.1, num_examples=8)
        line = progress.line(done, lr=0.1)
        left = (100 - done) * (20 if done > 40 else 1)
        assert line.endswith(f", {duration(left)} left") if (done - 1) % 40 >= 4 else "left" not in line, line
        if done == 40:
            progress.begin_stage()


def test_without_evaluations_only_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = loop.TrainProgress(visible=False, num_steps=1000, every=None)
    progress.resume(is_evaluated=False)
    for done in range(1, 11):
        clock.now += 0.5
        progress.step(done, loss=1.0, lr=0.1, num_examples=8)
    assert progress.line(10, lr=0.1) == "step 10 of 1,000, loss 1.0000, lr 1.00e-01, 16.0 examples/s, 8 min 15 s left"


def test_the_time_limit_and_the_watchdog_of_a_queued_library_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in a device's queue raise no error if another rank has ended: without the watchdog, a rank waits forever."""
    environ, joined = dict[str, str](), list[tuple[Any, ...]]()

    def join(library: str, *, timeout: timedelta, **_: object) -> None:
        joined.append((library, timeout, dict(environ)))

    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(module, "environment_store", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", join)
    backend: Any = SimpleNamespace(device=torch.device("cpu"), capabilities=SimpleNamespace(collectives="nccl"))
    TrainingRanks(Launched(rank=1, size=2, local_rank=1, is_local=True), backend=backend, timeout_s=90.0)

    on_loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    assert joined == [("nccl", timedelta(seconds=90), on_loopback)]
    assert environ == on_loopback, "groups that are made later read it too"


def test_a_rank_opens_only_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "open_backend", None)
    assert [device_name(wanted) for wanted in ("cuda", "npu", "npu:3", "cpu")] == ["cuda:1", "npu:1", "npu:3", "cpu"]


def judged(state: LoopState, *evaluations: tuple[float, float]) -> list[tuple[bool, int]]:
    """For each evaluation (score, loss): whether it is the best so far, and the number of worse ones in a row."""
    found = []
    for score, loss in evaluations:
        state.step += 10
        found.append((state.judge([score, -loss], loss), state.num_worse))
    return found


def test_a_run_goes_on_while_score_or_loss_improves() -> None:
    state = LoopState()
    # The model first gives one answer to everything, which is right less often than chance; only the loss falls.
    falling = judged(state, (0.14, 12.0), (0.10, 3.0), (0.10, 2.5), (0.10, 2.0))
    assert falling == [(True, 0), (False, 0), (False, 0), (False, 0)]
    assert state.best_step == 10
    assert judged(state, (0.10, 2.1), (0.12, math.nan)) == [(False, 1), (False, 2)]
    assert judged(state, (0.60, 2.2), (0.55, 2.3)) == [(True, 0), (False, 1)]
    assert (state.best, state.best_step, state.least_loss) == ([0.60, -2.2], 70, 2.0)


STATE = LoopState(step=3, num_steps=6, run="ab", best=[0.5, -math.inf], best_step=2, elapsed_s=1.5, num_examples=24)
SCALER = torch.amp.GradScaler("cpu").state_dict()


def whole() -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """The tensors of a checkpoint after one step, and their names and shapes."""
    parameters = {"a": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.zeros(4))}
    optimiser = NamedAdamW(parameters, no_decay=(), weight_decay=0.0)
    for one in parameters.values():
        one.grad = torch.ones_like(one)
    optimiser.torch.step()
    tensors = {f"weight/{name}": one.detach() for name, one in parameters.items()} | optimiser.state()
    return tensors, weight_shapes(parameters) | optimiser.shapes()


def test_a_checkpoint_is_read_as_it_was_written_and_refused_if_a_byte_differs(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    tensors, shapes = whole()
    for state in (LoopState(), LoopState(step=2, num_steps=2, num_examples=2, skipped=[1, 2], scaler=SCALER), STATE):
        write_checkpoint(path, tensors, state)
        found, read = read_checkpoint(path)
        assert read == state
        check_tensors(found, shapes, path=path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for damaged in (content.replace(b"1.5", b"2.5"), bytes(flipped), content.replace(b"weight/a", b"weight/c"), b"{"):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="damaged, or is no checkpoint") as raised:
        read_checkpoint(path)
    assert "--force" in raised.value.hint


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exp_avg/a": torch.ones(3, 2)}, "exp_avg/a.*shape"),
        ({"step/a": None}, "lacks 1 tensors .`step/a`"),
        ({"odd": torch.ones(1)}, "do not belong there .`odd`"),
    ],
)
def test_tensors_of_another_model_are_refused(changes: dict[str, Tensor | None], told: str, tmp_path: Path) -> None:
    tensors, shapes = whole()
    found = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=told):
        check_tensors(found, shapes, path=tmp_path / "last.safetensors")


ROW = "1,0.5,2.5,0.001,nan,10,300,0.1,,\r\n"
HEADER = ",".join(COLUMNS) + "\r\n"


def test_a_resumed_log_goes_on_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + ROW + "2" + ROW[1:] + "3,0.5,2.5")
    assert [row["step"] for row in read_log(path)] == ["1", "2"], "the last line is torn"
    log = RunLog(tmp_path, from_step=1)
    log.add(2, {"loss": 1.5})
    log.close()
    assert path.read_bytes().decode() == HEADER + ROW + "2,,1.5,,,,,,,\r\n"
    path.write_text("")
    assert read_log(path) == []


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\n",
        b"\0" * 100 + b"\n",
        b"a,b\n1,2\n",
        *((HEADER + row).encode() for row in ("x" + ROW[1:], "1,x" + ROW[3:], "1,2\r\n", "1" * 5000 + ROW[1:])),
        (HEADER + '"' + "x" * 200_000 + '"\r\n').encode(),
    ],
)
def test_a_file_that_is_no_log_is_refused_and_kept(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(TrainingError, match="no log of a training"):
        RunLog(tmp_path, from_step=1)
    assert (tmp_path / "log.csv").read_bytes() == content
