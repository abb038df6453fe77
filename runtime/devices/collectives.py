"""The libraries that compute sums over ranks, as data: how `torch.distributed` is configured for each.

gloo raises an error if a collective fails. NCCL and HCCL compute in the device's queue: their calls return at once, and
if another rank has ended, a wait for the device never returns. A watchdog of torch or torch_npu would then end every
process with SIGABRT, also the first rank before it can report which rank failed. Therefore the watchdogs are switched
off, and the first rank watches the other ranks itself.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from llama_adapter.runtime.devices.base import Collectives

# Seconds that HCCL accepts (CANN's table of environment variables). On chips of the family 910, the second setting is
# raised to at least 68.
_HCCL_CONNECT_S: Final = range(120, 7201)
_HCCL_EXEC_S: Final = range(1, 17341)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLibrary:
    """A backend of `torch.distributed`."""

    is_queued: bool  # it computes in the device's queue, and raises no error if another rank ends
    variables: Callable[[float], dict[str, str]]  # environment variables for a time limit in seconds
    abort: Callable[[torch.device], None]  # ends all waits of this process for collectives, as far as the library can


def _hccl_variables(timeout_s: float) -> dict[str, str]:
    return {
        "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_CONNECT_TIMEOUT": _within(timeout_s, _HCCL_CONNECT_S),
        "HCCL_EXEC_TIMEOUT": _within(timeout_s, _HCCL_EXEC_S),
    }


def _within(seconds: float, allowed: range) -> str:
    return str(min(max(math.ceil(seconds), allowed[0]), allowed[-1]))


def _abort_hccl(device: torch.device) -> None:
    dist.group.WORLD._get_backend(device).abort_hccl_comm("another rank failed")  # type: ignore[union-attr]


LIBRARIES: Mapping[Collectives, CollectiveLibrary] = {
    "gloo": CollectiveLibrary(is_queued=False, variables=lambda timeout_s: {}, abort=lambda device: None),
    "nccl": CollectiveLibrary(
        is_queued=True,
        variables=lambda timeout_s: {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},  # NCCL has no time limit
        abort=lambda device: dist.distributed_c10d._abort_process_group(),
    ),
    "hccl": CollectiveLibrary(is_queued=True, variables=_hccl_variables, abort=_abort_hccl),
}
