"""The libraries that compute sums over ranks, as data: what `torch.distributed` has to be told for each.

gloo raises where a collective fails. NCCL and HCCL compute in the device's queue: calls return at once, and a wait for
the device does not end if another rank has. Then a watchdog of torch or torch_npu ends the process with SIGABRT: the
first rank too, before it can say which rank has failed. So these watchdogs are switched off, and the first rank watches
the others itself.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from llama_adapter.runtime.devices.base import Collectives

# Seconds that HCCL takes (CANN's table of environment variables). Chips of the family 910 round the second up to 68.
_HCCL_CONNECT_S: Final = range(120, 7201)
_HCCL_EXEC_S: Final = range(1, 17341)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLibrary:
    """A backend of `torch.distributed`."""

    is_queued: bool  # computes in the device's queue, and raises nowhere if another rank ends
    variables: Callable[[float], dict[str, str]]  # of the environment, for a time limit in seconds
    abort: Callable[[torch.device], None]  # ends all waits for collectives of this process, as far as the library can


def _nccl_variables(timeout_s: float) -> dict[str, str]:
    # NCCL has no time limit of its own.
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def _hccl_variables(timeout_s: float) -> dict[str, str]:
    return {
        "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_CONNECT_TIMEOUT": _within(timeout_s, _HCCL_CONNECT_S),
        "HCCL_EXEC_TIMEOUT": _within(timeout_s, _HCCL_EXEC_S),
    }


def _within(seconds: float, allowed: range) -> str:
    return str(min(max(math.ceil(seconds), allowed[0]), allowed[-1]))


def _abort_nccl(device: torch.device) -> None:
    dist.distributed_c10d._abort_process_group()


def _abort_hccl(device: torch.device) -> None:
    dist.group.WORLD._get_backend(device).abort_hccl_comm("another rank failed")  # type: ignore[union-attr]


LIBRARIES: Mapping[Collectives, CollectiveLibrary] = {
    "gloo": CollectiveLibrary(is_queued=False, variables=lambda timeout_s: {}, abort=lambda device: None),
    "nccl": CollectiveLibrary(is_queued=True, variables=_nccl_variables, abort=_abort_nccl),
    "hccl": CollectiveLibrary(is_queued=True, variables=_hccl_variables, abort=_abort_hccl),
}
