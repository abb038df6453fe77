"""The GPUs that have pages of figures."""

import torch

GPUS = ("h100", "h200")  # each a word of the name that the driver gives


def gpu_here() -> str:
    """Which of `GPUS` torch sees; empty if none."""
    words = torch.cuda.get_device_name(0).lower().split() if torch.cuda.is_available() else []
    return next((name for name in GPUS if name in words), "")
