"""Linear layers with int8 weights: what they look like in a loaded module, and how they become plain ones again.

A quantised layer is an `nn.Linear` whose weight is int8 (out, in), with a buffer `weight_scale`, float32 (out,):
W = weight * weight_scale[:, None]. It cannot run as it is: `Backend.prepare` makes of it what the device computes.
"""

import torch
from torch import nn

SCALE = "weight_scale"


def is_quantised(linear: nn.Linear) -> bool:
    """Whether the weight is int8 with a scale for each output."""
    return linear.weight.dtype == torch.int8


def dequantise_linears(module: nn.Module) -> int:
    """Give the quantised layers inside `module` plain weights, in the module's own float type; returns how many."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and is_quantised(layer)]
    if not layers:
        return 0
    dtype = float_type(module)
    for layer in layers:
        weight = (layer.weight.float() * getattr(layer, SCALE)[:, None]).to(dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        delattr(layer, SCALE)
    return len(layers)


def float_type(module: nn.Module) -> torch.dtype:
    """The type of the activations: the narrowest of what is not quantised; some layers may stay in float32."""
    floats = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    return min(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
