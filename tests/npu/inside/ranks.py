"""Two ranks with an NPU each: torch_npu's own HCCL process group, over the sockets of tests/npu/fake_hccl.c.

A kernel runs on the host when its stream reaches it, so code that does not wait for a sum also reads it too early here.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload

import llama_adapter.app.models.parallel.group as group_module
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.learning.training.ranks import TrainingRanks
from llama_adapter.app.models.parallel import rank_process
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.device_failures import explain_device_error
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.devices.collectives import LIBRARIES
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from tests.npu.inside import decoder
from tests.npu.inside.host_ops import HostOps, host_view

FATAL = "FAKE_FATAL"  # a file; if it exists, the other rank kills itself in its next sum
LOG = "FAKE_HCCL_LOG"


class QueuedOps(HostOps):
    """Kernels run when their stream reaches them."""

    def _run(self, func: OpOverload, compute: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        torch.npu.current_stream().synchronize()
        return compute()


# The whole model


def model() -> dict[str, Any]:
    """Captions of two ranks, the calls of HCCL, and the error when the other rank dies during a step."""
    group_module.ENTRY = f"{__name__}:other_rank"  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {LOG: f"{folder}/log", FATAL: f"{folder}/fatal"}
        open_backend("npu:0")
        with QueuedOps() as mode:
            captioner = decoder.load("npu:0", tensor_parallel=2)
            given = decoder.answers(captioner)
            log = Path(os.environ[LOG]).read_text().splitlines()
            Path(os.environ[FATAL]).touch()
            told = _failure(captioner)
            captioner.close()
        return {
            "given": given,
            "expected": decoder.captions_on_cpu(),
            "operators": captioner.info.operators,
            "device": captioner.info.device,
            "calls": mode.calls,
            "log": log,
            "told": told,
            "variables": [name for name in os.environ if "HCCL" in name and name != LOG],
        }


def _failure(captioner: Captioner) -> str:
    try:
        captioner.caption(next(iter(sample_pictures().iterdir())))
    except RankError as error:
        return error.message
    return "nothing"


def other_rank(descriptor: str, started: str) -> None:
    """`rank_process.main`, with kernels run on the host."""
    load_torch_npu()
    open_backend("npu:1")
    all_reduce = dist.all_reduce

    def sum_unless_fatal(*args: Any, **kwargs: Any) -> Any:
        if os.path.exists(os.environ[FATAL]):
            os.kill(os.getpid(), signal.SIGKILL)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = sum_unless_fatal
    with QueuedOps():
        rank_process.main(descriptor, started)


# The queue


def queue() -> dict[str, Any]:
    """What the host reads of a sum before, after and without waiting, and after the other rank has gone."""
    with tempfile.TemporaryDirectory() as folder:
        if not (other := os.fork()):
            _add_two(_joined(1, folder))
            os._exit(0)
        report = _read_sums(_joined(0, folder), other)
    return report


def _joined(rank: int, folder: str) -> Any:
    open_backend(f"npu:{rank}")
    os.environ |= LIBRARIES["hccl"].variables(600)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    return store


def _add_two(store: Any) -> None:
    with QueuedOps():
        for number in range(3):
            store.wait([f"go {number}"])
            dist.all_reduce(torch.full((4,), 2.0, device="npu"))
        _training_sum(1)
        torch.npu.synchronize()


def _training_sum(rank: int) -> list[float]:
    """The sum of losses in a training run, which the host adds up in float64: HCCL adds no such numbers."""
    ranks = object.__new__(TrainingRanks)
    ranks.rank, ranks.size, ranks._device, ranks._timeout_s = rank, 2, torch.device("npu"), 600.0
    return ranks.sum(torch.tensor([0.5, 3.0 + rank], dtype=torch.float64)).tolist()  # type: ignore[no-any-return]


def _read_sums(store: Any, other: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    with QueuedOps():
        store.set("go 0", "")
        dist.all_reduce(torch.ones(4, device="npu"))  # creates the communicators

        waited = torch.ones(4, device="npu")
        dist.all_reduce(waited)
        report["memory at once"] = host_view(waited).tolist()
        store.set("go 1", "")
        report["read"] = (waited * 10).tolist()

        unwaited = torch.ones(4, device="npu")
        work = dist.all_reduce(unwaited, async_op=True)
        report["read without wait"] = (unwaited * 10).tolist()
        store.set("go 2", "")
        work.wait()
        report["read after wait"] = (unwaited * 10).tolist()

        report["training"] = _training_sum(0)

        os.waitpid(other, 0)
        lost = torch.ones(4, device="npu")
        dist.all_reduce(lost)
        threading.Thread(target=_abort_once_waiting).start()
        try:
            report["lost"] = lost.tolist()
        except RuntimeError as error:
            report["lost"] = str(error)
            report["lost is a device's error"] = explain_device_error(str(error)) is not None
    return report


def _abort_once_waiting() -> None:
    time.sleep(0.1)  # the result is the same whether or not the read has begun
    LIBRARIES["hccl"].abort(torch.device("npu"))
