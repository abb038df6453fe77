"""A captioner on a device with memory for few rows or pictures, and the errors that report a shortage."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, Plan, PrefillPlan, ScorePlan

SHORTAGES: dict[str, Callable[[], Exception]] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "numpy": MemoryError,
    "npu": lambda: RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.97 GiB total capacity)"),
}


class Device:
    """The numbers that there is memory for; `None` is any number."""

    def __init__(
        self,
        *,
        rows: int | None = None,
        pictures: int | None = None,
        programs: Sequence[str] = ("prefill", "decode", "score"),
        shortage: Callable[[], Exception] = SHORTAGES["torch"],
    ) -> None:
        self.rows, self.pictures, self.programs, self.shortage = rows, pictures, programs, shortage
        self.calls: list[tuple[str, int]] = []  # programs that had enough memory, and their rows
        self.num_shortages = 0

    def take(self, program: str, count: int, most: int | None) -> None:
        """Raise the device's shortage if `count` exceeds `most`."""
        if most is not None and count > most:
            self.num_shortages += 1
            raise self.shortage()
        self.calls.append((program, count))


class NarrowRunner:
    """A runner that runs out of memory before a program begins or, with `is_late`, after it has computed."""

    def __init__(self, inner: Any, device: Device, *, is_late: bool = False) -> None:
        self._inner, self._device, self._is_late = inner, device, is_late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, plan: Plan) -> Any:
        # A mixed plan needs as much memory as its prefill; see `MixedPlan`.
        kinds = {PrefillPlan: "prefill", MixedPlan: "prefill", DecodePlan: "decode", ScorePlan: "score"}
        program = kinds[type(plan)]
        result = self._inner.run(plan) if self._is_late else None
        self._device.take(program, len(plan.rows), self._device.rows if program in self._device.programs else None)
        return result if self._is_late else self._inner.run(plan)

    def warm_up(self, **lengths: int) -> Any:
        self._device.take("warm_up", self._inner.config.num_slots, self._device.rows)
        return self._inner.warm_up(**lengths)


class NarrowVision:
    """An encoder that runs out of memory."""

    def __init__(self, inner: Any, device: Device) -> None:
        self._inner, self._device = inner, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        self._device.take("encode", len(pixels_BHWC), self._device.pictures)
        encoded: Tensor = self._inner.encode(pixels_BHWC)
        return encoded


def narrow(parts: Parts, device: Device, *, is_late: bool = False) -> Captioner:
    """A captioner with the weights of `parts`, on this device."""
    runner: Any = NarrowRunner(parts.runner, device, is_late=is_late)
    vision: Any = NarrowVision(parts.vision, device)
    return Captioner(dataclasses.replace(parts, runner=runner, vision=vision))
