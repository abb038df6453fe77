"""Simulates torch_npu 2.13.0 on a machine where it cannot work. If it is on PYTHONPATH, `import torch` finds it.

FAKE_TORCH_NPU selects the problem: `libraries` (default: CANN is absent, or its set_env.sh was not sourced), `home`
(ASCEND_HOME_PATH does not exist), `cuda` (torch is a CUDA build), `version` (built for another torch), `device`
(everything is installed, but there is no device). The texts are those of torch_npu 2.13.0.
"""

import os
import types

import torch

__version__ = "2.13.0"

_STAMP = "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:-1, RankID:-1)"


def _no_device() -> types.ModuleType:
    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("torch.npu")
    module.is_available = lambda: False
    module.device_count = lambda: 0
    module.is_initialized = lambda: False
    module._is_in_bad_fork = lambda: False
    torch._register_device_module("npu", module)
    return module


match os.environ.get("FAKE_TORCH_NPU", "libraries"):
    case "libraries":
        raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
    case "home":
        raise Exception(
            f"ASCEND_HOME_PATH : {os.environ.get('ASCEND_HOME_PATH', '/nowhere')} does not exist. Please run "
            f"'source set_env.sh' in the CANN installation path.\n{_STAMP} ERR00005 PTA resource not found"
        )
    case "cuda":
        raise RuntimeError(
            "Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can install the cpu "
            "version of PyTorch to use your npu device, or use the cuda device with 'export "
            f"TORCH_DEVICE_BACKEND_AUTOLOAD=0'.\n{_STAMP} ERR00007 PTA feature not supported"
        )
    case "version":
        raise ImportError("libtorch_npu.so: undefined symbol: _ZN3c1021SomethingOfAnotherTorchE")
    case "device":
        npu = _no_device()
    case other:
        raise AssertionError(f"FAKE_TORCH_NPU={other}")


def _autoload() -> None:
    """The function named by the entry point in the group `torch.backends`."""
