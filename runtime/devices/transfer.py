"""Copies between the host and a device. Where the device has a queue, the host does not wait for them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | np.ndarray


def upload(values: Numbers, device: torch.device) -> Tensor:
    """Numbers as a tensor on a device: int64, float32, or the type of an array, whose memory it shares on the host.

    Float64 becomes float32, and infinite above its range. A GPU copies the tensor from pinned memory after the work
    that it was given before.
    """
    array = np.asarray(values)  # of numbers, torch would take its default dtype and device, which programs set
    with np.errstate(over="ignore"):
        host = torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def shared(values: Tensor | np.ndarray) -> Tensor:
    """A tensor itself, or one that shares an array's memory. Torch's default device has no effect."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def fetch(values: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; the function that is returned waits for the copy.

    A tensor on the host is returned itself.
    """
    if values.device.type != "cuda":
        return values.cpu
    host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        event.synchronize()
        return host

    return wait


def begin_fetch(values: Tensor) -> Tensor:
    """A copy on the host, which is complete at the queue's next mark. Later work may overwrite `values`."""
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.device.type == "cuda")
    return host.copy_(values, non_blocking=True)
