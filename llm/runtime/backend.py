"""Devices: which there are, what each can do, and how to wait for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from llm.errors import DeviceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a device can do, as data: the engine asks for these, never for a device's name."""

    dtypes: tuple[str, ...]


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

    def synchronise(self) -> None:
        """Return when all work handed to the device is done."""
        ...

    def free_bytes(self) -> int | None:
        """Memory that can still be taken, in bytes; None where the system does not tell."""
        ...


class CpuBackend:
    """The host's own cores; every operation is synchronous."""

    name = "cpu"
    device = torch.device("cpu")
    capabilities = Capabilities(dtypes=("float32", "bfloat16", "float16"))

    def synchronise(self) -> None:
        return

    def free_bytes(self) -> int | None:
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(kibibytes[0]) * 1024 if kibibytes else None


class CudaBackend:
    """One NVIDIA GPU."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        with torch.cuda.device(self.device):
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        half = ("bfloat16", "float16") if has_bfloat16 else ("float16",)
        # float32 means float32: by default cuDNN would round the patch convolution's inputs to 10 bits.
        torch.backends.cudnn.allow_tf32 = False
        self.capabilities = Capabilities(dtypes=("float32", *half))

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0]


def open_backend(name: str) -> Backend:
    """Backend for `cpu`, `cuda`, `cuda:N` or `auto` (the first GPU, else the CPU).

    Raises DeviceError when the name is unknown or that device is not present.
    """
    available = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name == "auto":
        name = available[1] if len(available) > 1 else "cpu"
    if name == "cuda":
        name = "cuda:0"
    if name not in available:
        raise DeviceError(
            f"No device named `{name}`; available: {', '.join(available)}",
            hint="pass one of these as --device, or `--device auto`",
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
