"""Names of devices: parses ours, and translates those of other systems. Imports no torch."""

import os
import re
from importlib.util import find_spec

_OURS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "npu": "npu", "ascend": "npu"}
RAY_NAMES = {"CPU": "CPU", "CUDA": "GPU", "NPU": "NPU"}  # of a kind of device among Ray's resources
_NAME = re.compile(r"(cpu)|(cuda|npu)(?::([0-9]{1,3}))?")

_ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows beneath Linux, of AMD


def may_have_accelerator() -> bool:
    """Whether `auto` may find a device other than the CPU; False is certain."""
    return find_spec("torch_npu") is not None or any(map(os.path.exists, _ACCELERATORS))


def our_device(name: str, *, index: int | None = None) -> str | None:
    """`gpu:1` -> `cuda:1`, `Ascend` -> `npu`, `Ascend` with index 2 -> `npu:2`; None for an unknown name."""
    kind, colon, own_index = name.lower().partition(":")
    ours = _OURS.get(kind)
    if ours is None or (colon and not own_index.isdecimal()):
        return None
    if ours == "cpu":
        return ours
    number = own_index if colon else "" if index is None else str(index)
    return f"{ours}:{number}" if number else ours


def split_device(device: str) -> tuple[str, int | None]:
    """`npu:2` -> npu, 2; `npu` -> npu, 0; `cpu` -> cpu, None. Raises ValueError."""
    match = _NAME.fullmatch(device)
    if match is None or int(match[3] or 0) > 255:
        raise ValueError(f"wanted cpu, cuda:N or npu:N with N from 0 to 255, got {device!r}")
    return (match[1], None) if match[1] else (match[2], int(match[3] or 0))


def om_device_id(device: int | str) -> int:
    """The number of a device that runs OM files: 2, `npu:2` -> 2. Raises ValueError."""
    kind, number = split_device(device) if isinstance(device, str) else ("npu", device)
    if kind != "npu" or type(number) is not int or not 0 <= number <= 255:
        raise ValueError(f"wanted a number from 0 to 255 or npu:N, got {device!r}")
    return number
