"""Small numbers on their way between host and device; where the device has a queue, nobody waits for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_adapter.runtime.devices.backend import Backend, Mark


class Fetched:
    """Whole numbers that are on their way to the host."""

    def __init__(self, values: Tensor, *, mark: Mark | None) -> None:
        self._values, self._mark = values, mark

    def read(self) -> list[int]:
        """The numbers; waits until the device has come to them."""
        if self._mark is not None:
            self._mark.wait()
        numbers: list[int] = self._values.tolist()
        return numbers


class Transfer:
    """The way to and from one device."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Pinned memory is what a device can copy while the host goes on. The host as its own device needs none.
        self._pins = backend.capabilities.queued and backend.device.type != "cpu"

    def upload(self, values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]]) -> Tensor:
        """A tensor on the device, int64 or float32."""
        if not self._pins:
            return torch.tensor(values, device=self._backend.device)
        return torch.tensor(values, pin_memory=True).to(self._backend.device, non_blocking=True)

    def fetch(self, values: Tensor) -> Fetched:
        """Begin to bring int64 `values` to the host.

        With a queue they may be overwritten by what is computed from now on; without one they are read at once.
        """
        if not self._backend.capabilities.queued:
            return Fetched(values, mark=None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins)
        host.copy_(values, non_blocking=True)
        return Fetched(host, mark=self._backend.mark())
