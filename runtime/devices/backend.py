"""Devices: which there are, what each can do, and how to wait for it."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.devices.cuda_graphs import CUDA_GRAPH, CudaGraphs
from llama_adapter.runtime.devices.host_memory import free_host_bytes, total_host_bytes
from llama_adapter.runtime.devices.packed import pack_linears
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.kernels.library import Library, find_library
from llama_adapter.runtime.kernels.linear import INT8_ACTIVATIONS, install_kernels
from llama_adapter.runtime.operators.base import ATEN, Operators
from llama_adapter.runtime.operators.cuda import FUSED
from llama_adapter.runtime.schemes.quantised import dequantise_linears

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

EAGER = "eager"
GRAPH_ALIASES = {"acl_graph": "npugraph_ex"}  # an older name of the same thing

Program = TypeVar("Program", bound=Callable[..., Any])

OperatorChoice = Literal["auto", "aten"]  # a device's fused operators where it has them, or plain torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a device can do, as data: the engine asks for these, never for a device's name."""

    dtypes: tuple[str, ...]
    static_shapes: bool = False  # every new shape costs a compilation, so shapes are rounded up to few
    graph_modes: tuple[str, ...] = ()  # what `compile` takes
    queued: bool = False  # computes while the host goes on, so ids are read when the next step is under way
    collective: str = "gloo"  # torch.distributed's backend between devices of this kind; nothing is distributed yet
    copies_weights: bool = False  # `prepare` makes its own, so that weights mapped from a file take memory too
    runs_om: bool = False  # an exported OM encoder can share this very device
    most_rows: int = 64  # beyond which a batch is hardly faster, so that no more are taken unasked; a guess


class Mark(Protocol):
    """A moment of the device, noted without waiting for it."""

    def ms_since(self, earlier: Any) -> float:
        """Milliseconds from an earlier mark of the same device; waits for this one."""
        ...

    def wait(self) -> None:
        """Return when the device has come to this point."""
        ...


class Backend(Protocol):
    """One device of one kind."""

    @property
    def name(self) -> str:
        """As a report prints it, for example `cpu` or `cuda:0 (NVIDIA H100)`."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def kernels(self) -> Library | None:
        """Of our own, where modules were prepared with them: what `NativeRunner` needs."""
        ...

    def synchronise(self) -> None:
        """Return when all work handed to the device is done."""
        ...

    def mark(self) -> Mark | None:
        """The point that the device's queue has come to; None where the host does the work itself."""
        ...

    def free_bytes(self) -> int | None:
        """Memory that can still be taken, in bytes; None where the system does not tell."""
        ...

    def total_bytes(self) -> int | None:
        """All memory of the device, in bytes; None where the system does not tell."""
        ...

    def empty_caches(self) -> None:
        """Give memory that is kept for later use back, after a step for which there was not enough."""
        ...

    def choose_operators(
        self, config: DecoderConfig, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        """The operators that suit this device, model and mode; with `aten`, plain torch."""
        ...

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        """Bring the weights of a module on this device into the layout that it computes best in.

        Quantised layers (runtime/schemes/quantised.py) become what the device computes; with `aten`, plain torch.
        """
        ...

    def computes_int8(self, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        """Whether `prepare` leaves 8-bit weights as they are; otherwise it widens them to the type of activations."""
        ...

    def compile(self, program: Program, *, mode: str) -> Program:
        """A program of fixed shapes as one graph; raises DeviceError unless `mode` is among the graph modes.

        The program takes tensors and gives a tuple of them, and what it writes elsewhere is the same when it is run
        twice: it may be run more than once at its first call. Its results may be overwritten by any graph's next call.
        """
        ...


class PlainBackend:
    """What holds for devices that torch serves without help: its own operators and layout, and no graphs yet."""

    name: str
    capabilities: Capabilities
    kernels: Library | None = None

    def choose_operators(
        self, config: DecoderConfig, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        return ATEN

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        dequantise_linears(module)

    def computes_int8(self, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        return False

    def compile(self, program: Program, *, mode: str) -> Program:
        raise no_graph_mode(mode, backend=self.name, modes=self.capabilities.graph_modes)


class CpuBackend(PlainBackend):
    """The host's own cores; every operation is synchronous."""

    name = "cpu"
    device = torch.device("cpu")
    # On two cores, 1, 5 and 16 rows answered 165, 199 and 247 pictures/s.
    capabilities = Capabilities(dtypes=("float32", "bfloat16", "float16"), copies_weights=True, most_rows=16)

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        self.kernels = _kernels(wanted)
        if self.kernels is not None:
            install_kernels(module, library=self.kernels)
        dequantise_linears(module)
        pack_linears(module)

    def computes_int8(self, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        kernels = _kernels(wanted)
        return kernels is not None and kernels.takes(torch.int8) and activations in INT8_ACTIVATIONS

    def synchronise(self) -> None:
        return

    def mark(self) -> None:
        return None

    def free_bytes(self) -> int | None:
        return free_host_bytes()

    def total_bytes(self) -> int | None:
        return total_host_bytes()

    def empty_caches(self) -> None:
        return


def _kernels(wanted: OperatorChoice) -> Library | None:
    return find_library().library if wanted == "auto" else None


class CudaBackend(PlainBackend):
    """One NVIDIA GPU."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        with torch.cuda.device(self.device):
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        half = ("bfloat16", "float16") if has_bfloat16 else ("float16",)
        # float32 means float32: by default cuDNN would round the patch convolution's inputs to 10 bits.
        torch.backends.cudnn.allow_tf32 = False
        self.capabilities = Capabilities(
            dtypes=("float32", *half), graph_modes=(CUDA_GRAPH,), queued=True, collective="nccl"
        )
        self._graphs: CudaGraphs | None = None

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> "EventMark":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return EventMark(event)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0]

    def total_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[1]

    def empty_caches(self) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def choose_operators(
        self, config: DecoderConfig, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        return ATEN if wanted == "aten" else FUSED

    def compile(self, program: Program, *, mode: str) -> Program:
        if mode not in self.capabilities.graph_modes:
            raise no_graph_mode(mode, backend=self.name, modes=self.capabilities.graph_modes)
        if self._graphs is None:
            self._graphs = CudaGraphs(self.device)
        return self._graphs.capture_at_first_call(program)


@dataclass(frozen=True, slots=True)
class EventMark:
    """A mark made of a device's event, as `torch.cuda.Event` and its like are."""

    event: Any

    def ms_since(self, earlier: "EventMark") -> float:
        self.wait()
        return float(earlier.event.elapsed_time(self.event))

    def wait(self) -> None:
        self.event.synchronize()


def open_backend(name: str) -> Backend:
    """Backend for `cpu`, `cuda`, `cuda:N`, `npu`, `npu:N` or `auto` (the first GPU, else the first NPU, else the CPU).

    Raises DeviceError when the name is unknown or that device is not present.
    """
    if name == "auto":
        return open_best()[0]
    kind, _, number = name.partition(":")
    if kind == "npu" and (number.isdecimal() or name == "npu"):
        from llama_adapter.runtime.devices.npu import open_npu

        return open_npu(int(number or 0))
    available = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name == "cuda":
        name = "cuda:0"
    if name not in available:
        raise DeviceError(
            f"No device named `{name}`; available: {', '.join(available)}",
            hint="pass one of these as --device, `npu:0` on an Ascend machine, or `--device auto`",
        )
    return CpuBackend() if name == "cpu" else CudaBackend(int(name.removeprefix("cuda:")))


def resolve_dtype(name: str, *, backend: Backend) -> torch.dtype:
    """torch dtype for a name that `backend` can compute in.

    Raises DeviceError when the name is unknown or the device lacks that type.
    """
    if name not in backend.capabilities.dtypes:
        raise DeviceError(
            f"{backend.name} cannot compute in dtype `{name}`",
            hint=f"pass one of {', '.join(backend.capabilities.dtypes)} as --dtype",
        )
    return DTYPES[name]


def open_best() -> tuple[Backend, str]:
    """What `auto` means here, and a note where an accelerator's software is installed and of no use."""
    kind = accelerator_kind()
    if kind is None:
        return CpuBackend(), ""
    try:
        return open_backend(f"{kind}:0"), ""
    except DeviceError as error:
        return CpuBackend(), f"{error.message}; the CPU computes"


def accelerator_kind() -> str | None:
    """The kind of accelerator that this installation is made for, `cuda` or `npu`; no device is opened to find out."""
    if torch.cuda.device_count():
        return "cuda"
    return "npu" if importlib.util.find_spec("torch_npu") is not None else None


def resolve_mode(name: str, *, backend: Backend) -> str:
    """How `backend` is to run the decoder's steps: `eager`, or one of its graph modes; `graph` is the first of them.

    Raises DeviceError when the device does not have it.
    """
    modes = backend.capabilities.graph_modes
    mode = GRAPH_ALIASES.get(name, name)
    if mode == "graph" and modes:
        return modes[0]
    if mode not in (EAGER, *modes):
        raise no_graph_mode(name, backend=backend.name, modes=modes)
    return mode


def no_graph_mode(mode: str, *, backend: str, modes: tuple[str, ...]) -> DeviceError:
    """The error for a mode that a device does not have."""
    return DeviceError(f"{backend} has no mode `{mode}`", hint=f"pass one of {', '.join(('eager', *modes))} as --mode")
