"""The device of these tests: a GPU, or what the variable TEST_DEVICE names. `TEST_DEVICE=cpu` tries them without a GPU.

`python -m tests.cuda.device` names the GPU, or fails.
"""

import functools
import os
import sys
from typing import Any

import torch

from llama_adapter.app.captioning.captioner import Captioner

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
IS_GPU = DEVICE != "cpu"
GRAPHS = "cuda_graph" if IS_GPU else "eager"  # the CPU has no graphs


def missing() -> str:
    """Why there is no such device; empty if there is one."""
    if not IS_GPU or torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"these tests need an NVIDIA GPU, and torch {torch.__version__}, {built}, sees none (does `nvidia-smi`?)"


@functools.cache
def loaded(device: str = DEVICE, **options: Any) -> Captioner:
    """The embedded model with these settings, loaded once. By default in float32, with 16 rows."""
    return Captioner.load(device=device, **{"dtype": "float32", "batch_size": 16, **options})


if __name__ == "__main__":
    if problem := missing():
        sys.exit(f"error: {problem}")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if IS_GPU else DEVICE}")
