"""What every device provides: the Backend protocol, capabilities as data, and marks in the device's queue."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn

from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.operators import DecoderSizes, Operators
from llama_adapter.runtime.schemes import OperatorChoice, Precision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

EAGER = "eager"
Collectives = Literal["gloo", "nccl", "hccl"]  # backends of torch.distributed

Program = TypeVar("Program", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a device can do, as data. The engine reads these capabilities and never checks a device's name."""

    dtypes: tuple[str, ...]  # the best one first
    large_dtype: str | None = None  # better than the first dtype for models that are not small
    static_shapes: bool = False  # each new shape costs a compilation, so shapes are rounded up to a few
    graph_modes: tuple[str, ...] = ()  # modes that `compile` accepts
    queued: bool = False  # calls return before the device has finished, so token ids are read one step late
    copies_weights: bool = False  # `prepare` copies the weights, so memory-mapped weights need memory too
    collectives: Collectives = "gloo"  # the library with which the ranks of a split decoder compute sums
    runs_om: bool = False  # an exported OM encoder can share the device
    most_rows: int = 64  # largest automatic batch size; larger ones are hardly faster (an estimate)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the device's queue: an event of the device, such as `torch.cuda.Event`."""

    event: Any

    def ms_since(self, earlier: "Mark") -> float:
        """Milliseconds since an earlier mark of the same device. Waits for this mark."""
        self.wait()
        return float(earlier.event.elapsed_time(self.event))

    def wait(self) -> None:
        """Return when the device has reached this point."""
        self.event.synchronize()


class Backend(Protocol):
    """One device of one kind. Classes of devices inherit from it what most devices share."""

    name: str  # for reports, for example `cpu` or `cuda:0 (NVIDIA H100)`
    device: torch.device
    capabilities: Capabilities
    kernels: Library | None = None  # this project's C kernels if `prepare` has used them; `KernelRunner` needs them

    def synchronise(self) -> None:
        """Return when the device has finished all its work."""

    def mark(self) -> Mark | None:
        """The current end of the device's queue; None if the host computes."""
        return None

    def profiler(self, folder: Path) -> AbstractContextManager[object]:
        """A context that profiles the device and writes a Chrome trace into `folder` when it ends."""

    def free_bytes(self) -> int | None:
        """Memory that can still be allocated, in bytes; None if unknown."""

    def empty_caches(self) -> None:
        """Release cached memory. Called after loading and after an allocation has failed."""

    def choose_operators(
        self, sizes: DecoderSizes, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        """The operators for a decoder of these sizes in `mode`. With `aten`, plain torch computes."""

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        """Convert the weights of a module to the layout that this device computes with, in place.

        Quantised layers (runtime/schemes/layers.py) are replaced or dequantised. With `aten`, plain torch computes.
        """

    def computes_in(self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        """Whether `prepare` keeps weights of `precision`; otherwise it dequantises them to the type of activations."""

    def refusal(self, precision: Precision, *, wanted: OperatorChoice = "auto") -> str:
        """The reason why the device has no operators for weights of `precision`, with any type of activations.

        Empty if it has such operators or needs none, and with `aten`, because weights are then dequantised.
        """
        return ""

    def packed_layout(
        self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto"
    ) -> PackedLayout | None:
        """The layout of packed weights that `prepare` accepts; None if it accepts plain weights only.

        Float weights have the type of the activations.
        """
        return None

    def compile(self, program: Program, *, mode: str) -> Program:
        """A program with fixed shapes and dtypes as one graph. Raises DeviceError if the device does not have the mode.

        The program takes tensors and returns a tuple of tensors, whose first dimension is rows. The first call may run
        it more than once, so its side effects must be idempotent. The next call of any graph may overwrite its results.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A kind of device other than the CPU, as an entry of the registry."""

    kind: str  # the part of a device name before the colon
    is_installed: Callable[[], bool]  # without opening a device
    count: Callable[[], int | None]  # devices present; None if only `open` can tell
    open: Callable[[int], Backend]  # index from 0; raises DeviceError


def require_mode(mode: str, *, backend: Backend) -> None:
    """Raise DeviceError unless `mode` is a graph mode of the device."""
    modes = backend.capabilities.graph_modes
    if mode not in modes:
        raise DeviceError(
            f"{backend.name} has no mode `{mode}`", hint=f"pass one of {', '.join((EAGER, *modes))} as --mode"
        )
