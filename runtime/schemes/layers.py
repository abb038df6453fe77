"""Quantised linear layers of a loaded module, and how they become plain ones.

A quantised layer is an `nn.Linear` whose weight has the stored form of its scheme. The other stored tensors are
buffers, for example `weight_scale`. The layer cannot compute as it is: `Backend.prepare` replaces or dequantises it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.scheme import scheme_of

WEIGHT = "weight"


def load_state(sketch: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a module on the meta device the tensors of `state` for inference; they are shared, not copied.

    Raises RuntimeError if names or shapes differ from those of the module.
    """
    sketch.requires_grad_(False)  # integers have no gradient
    for name, layer in sketch.named_modules():
        weight = state.get(f"{name}.{WEIGHT}")
        if isinstance(layer, nn.Linear) and weight is not None and (scheme := scheme_of(weight.dtype)) is not None:
            shape = (layer.out_features, layer.in_features)
            forms = scheme.forms(shape, layer.weight.dtype)
            store_parts(layer, {s: torch.empty(f.shape, dtype=f.dtype, device="meta") for s, f in forms.items()})
    sketch.load_state_dict(state, assign=True)
    sketch.eval()


def store_parts(layer: nn.Linear, parts: Mapping[str, Tensor]) -> None:
    """Put the stored tensors of a weight into its layer."""
    layer.weight = nn.Parameter(parts[""], requires_grad=False)
    for suffix, tensor in parts.items():
        if suffix:
            layer.register_buffer(WEIGHT + suffix, tensor)


def replace_quantised(module: nn.Module, build: Callable[[nn.Linear, Precision], nn.Module | None]) -> int:
    """Replace quantised layers inside `module` by what `build` makes of them, one after the other; returns how many.

    `build` takes a layer and its precision; where it returns None, the layer stays. Each weight is released when its
    layer is replaced.
    """
    num_replaced = 0
    for owner in module.modules():  # not a list, which would keep all weights alive
        for name in [name for name, _ in owner.named_children()]:
            child = getattr(owner, name)
            if not isinstance(child, nn.Linear) or (scheme := scheme_of(child.weight.dtype)) is None:
                continue
            if (built := build(child, scheme.name)) is not None:
                setattr(owner, name, built)
                num_replaced += 1
    return num_replaced


def dequantise_linears(module: nn.Module) -> None:
    """Give the quantised layers inside `module` plain weights, in the float type of the module."""
    layers = [
        (layer, scheme)
        for layer in module.modules()
        if isinstance(layer, nn.Linear) and (scheme := scheme_of(layer.weight.dtype)) is not None
    ]
    if not layers:
        return
    dtype = float_type(module)
    for layer, scheme in layers:
        weight = scheme.dequantise({suffix: getattr(layer, WEIGHT + suffix) for suffix in scheme.suffixes})
        for suffix in filter(None, scheme.suffixes):
            delattr(layer, WEIGHT + suffix)
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)


def float_type(module: nn.Module) -> torch.dtype:
    """The type of the activations: the narrowest float type, since some layers may stay in float32."""
    floats = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    return min(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
