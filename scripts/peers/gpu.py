"""What the page says about a GPU."""

import re
from pathlib import Path
from typing import Any

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def gpu_circumstances() -> dict[str, Any]:
    """Name of the first GPU, its driver if the system states it, and the version of CUDA that torch uses."""
    return {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda), "driver": _driver()}


def _driver() -> str:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return "" if found is None else found[0]
