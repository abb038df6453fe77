"""Devices by name: the CPU, and the registry of accelerators.

A new kind of device is one file with a backend (`base.Backend`) and an `Accelerator`, and one entry in ACCELERATORS.
"""

import torch

from llama_adapter.runtime.devices.base import DTYPES, EAGER, Backend, Capabilities, Mark, require_mode
from llama_adapter.runtime.devices.cpu import CpuBackend
from llama_adapter.runtime.devices.cuda import CUDA, CUDA_GRAPH
from llama_adapter.runtime.devices.npu import GRAPH_COMPILERS, NPU
from llama_adapter.runtime.errors import DeviceError

__all__ = [
    "DTYPES",
    "EAGER",
    "Backend",
    "Capabilities",
    "CpuBackend",
    "Mark",
    "accelerator_kind",
    "open_backend",
    "open_best",
    "resolve_dtype",
    "settle_mode",
]

ACCELERATORS = (NPU, CUDA)  # `auto` takes the first one that works
_MODE_ALIASES = {"acl_graph": "npugraph_ex"}  # old name -> new name
_GRAPH_MODES = frozenset({"graph", CUDA_GRAPH, *GRAPH_COMPILERS, *_MODE_ALIASES})  # of all devices


def open_backend(name: str) -> Backend:
    """Backend for `cpu`, `auto`, or an accelerator by its kind and index: `cuda`, `cuda:1`, `npu:0`.

    Raises DeviceError for an unknown name or a device that is not available.
    """
    if name == "auto":
        return open_best()[0]
    if name == "cpu":
        return CpuBackend()
    prefix, colon, number = name.partition(":")
    if number.isdecimal() or not colon:
        for accelerator in ACCELERATORS:
            count, index = accelerator.count(), int(number or 0)
            if accelerator.kind == prefix and (count is None or index < count):
                return accelerator.open(index)
    counts = {accelerator.kind: accelerator.count() or 0 for accelerator in ACCELERATORS}
    available = ["cpu", *(f"{kind}:{index}" for kind, count in counts.items() for index in range(count))]
    raise DeviceError(
        f"No device named `{name}`; available: {', '.join(available)}",
        hint="pass one of these as --device, `npu:0` on an Ascend machine, or `--device auto`",
    )


def open_best() -> tuple[Backend, str]:
    """The device that `auto` selects on this machine, and why: the first accelerator that opens, else the CPU."""
    failures: list[str] = []
    for accelerator in ACCELERATORS:
        if accelerator.is_installed():
            try:
                return accelerator.open(0), "; ".join((*failures, "the first accelerator"))
            except DeviceError as error:
                failures.append(error.message)
    return CpuBackend(), "; ".join(failures) or "no accelerator is installed"


def accelerator_kind() -> str | None:
    """The kind of accelerator that this installation supports, such as `cuda`; None without one. Opens no device."""
    return next((accelerator.kind for accelerator in ACCELERATORS if accelerator.is_installed()), None)


def resolve_dtype(name: str, *, backend: Backend) -> torch.dtype:
    """torch dtype for a name. Raises DeviceError if it is unknown or `backend` cannot compute in it."""
    if name not in backend.capabilities.dtypes:
        raise DeviceError(
            f"{backend.name} cannot compute in dtype `{name}`",
            hint=f"pass one of {', '.join(backend.capabilities.dtypes)} as --dtype",
        )
    return DTYPES[name]


def settle_mode(name: str, *, backend: Backend, num_ranks: int = 1, strict: bool = False) -> tuple[str, str]:
    """The mode of the decoder's steps on `backend`, and a note if steps run eager although a graph mode was asked for.

    The mode is `eager` or a graph mode. `graph` selects the first graph mode of the device. `auto` selects it too if
    the device records a program in milliseconds, and `eager` if it compiles each shape or if several ranks share the
    decoder. A graph mode that cannot run becomes `eager`. Other systems do the same, so their settings run on a device
    without graphs. Raises DeviceError for an unknown mode, and with `strict` for every mode that the device does not
    have.
    """
    modes = backend.capabilities.graph_modes
    if name == "auto":
        return modes[0] if modes and not backend.capabilities.static_shapes and num_ranks == 1 else EAGER, ""
    if name == EAGER:
        return name, ""
    is_graph = name in _GRAPH_MODES or name in modes
    if is_graph and num_ranks > 1 and not strict:
        return EAGER, f"steps run eager: no graph holds the sums over {num_ranks} ranks, so mode `{name}` is not used"
    mode = modes[0] if name == "graph" and modes else _MODE_ALIASES.get(name, name)
    try:
        require_mode(mode if mode in modes else name, backend=backend)
    except DeviceError as error:
        if strict or not is_graph:
            raise
        return EAGER, f"steps run eager: {error.message}"
    return mode, ""
