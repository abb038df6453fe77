"""Simulates NCCL on the host with gloo's collectives. As on a device, failed ones raise no error and never end.

`install` puts it in place, and gives each rank a simulated GPU whose tensors are on the host.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from llama_adapter.app.models.parallel import rank_process
from llama_adapter.runtime.devices import collectives
from llama_adapter.runtime.ranks import ALL_GATHER
from tests.fakes.cuda_graphs import HostCuda, install_gpus

ENTRY = f"{__name__}:main"
FATAL = "FAKE_FATAL"  # path of a file with the number of a signal, which other ranks send themselves in their next sum


class HostNccl:
    """Records the calls of `torch.distributed`."""

    def __init__(self) -> None:
        self.groups: list[tuple[str, str | None]] = []  # name of the library, and the watchdog's variable
        self.aborted = threading.Event()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        install_gpus(patch, count=2)
        patch.setattr(dist, "init_process_group", self._with_gloo(dist.init_process_group))
        for name in ("all_reduce", ALL_GATHER, "broadcast"):
            patch.setattr(dist, name, self._without_errors(getattr(dist, name)))
        library = replace(collectives.LIBRARIES["nccl"], abort=lambda device: self.aborted.set())
        patch.setattr(collectives, "LIBRARIES", {**collectives.LIBRARIES, "nccl": library})

    def _with_gloo(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(name: str, **options: Any) -> Any:
            self.groups.append((name, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")))
            return start("gloo", **options)

        return started

    def _without_errors(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, group: Any = None, **options: Any) -> Any:
            if group is not None:  # the group for commands
                return call(*args, group=group, **options)
            try:
                return call(*args, **options)
            except RuntimeError:
                self.aborted.wait()  # the memory then does not hold the sum

        return called


def main(descriptor: str, started: str) -> None:
    """Run another rank with these fakes."""
    patch = pytest.MonkeyPatch()
    HostNccl().install(patch)
    all_reduce = dist.all_reduce

    def fatal(*args: Any, **options: Any) -> Any:
        if os.path.exists(os.environ[FATAL]):
            with open(os.environ[FATAL]) as file:
                os.kill(os.getpid(), int(file.read()))
        return all_reduce(*args, **options)

    patch.setattr(dist, "all_reduce", fatal)
    patch.setattr(rank_process, "open_backend", lambda name: HostCuda())
    rank_process.main(descriptor, started)
