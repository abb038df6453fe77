"""Copies of small numbers between host and device; asynchronous where the device has a queue."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_adapter.runtime.devices.base import Backend, Mark


class Fetched:
    """Integers on their way to the host."""

    def __init__(self, values: Tensor, *, mark: Mark | None) -> None:
        self._values, self._mark = values, mark

    def read(self) -> list[int]:
        """The numbers; waits until the device has computed them."""
        if self._mark is not None:
            self._mark.wait()
        numbers: list[int] = self._values.tolist()
        return numbers


class Transfer:
    """Copies to and from one device."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # A device copies pinned memory asynchronously. The host as its own device needs none.
        self._pins = backend.capabilities.queued and backend.device.type != "cpu"

    def upload(self, values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]]) -> Tensor:
        """A tensor on the device, int64 or float32."""
        if not self._pins:
            return torch.tensor(values, device=self._backend.device)
        return torch.tensor(values, pin_memory=True).to(self._backend.device, non_blocking=True)

    def fetch(self, values: Tensor) -> Fetched:
        """Start copying int64 `values` to the host.

        With a queue, later work may overwrite them. Without one they are read at once.
        """
        if not self._backend.capabilities.queued:
            return Fetched(values, mark=None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins)
        host.copy_(values, non_blocking=True)
        return Fetched(host, mark=self._backend.mark())
