"""Stands in for torch_npu in the programs of this folder: the functions that they call, with the CPU as the device."""

import types

import torch

torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("torch.npu")
npu.set_device = npu.set_option = lambda value: None
torch._register_device_module("npu", npu)
torch.nn.Module.npu = lambda self, device=None: self
_C = types.SimpleNamespace(_npu_get_soc_version=lambda: 202)
