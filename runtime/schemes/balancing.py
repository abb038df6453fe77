"""Balances norms with the linear layers that read them, before weights are rounded, so that activations lose outliers.

A channel of a norm is divided by a factor, and the column of the next layer's weights is multiplied by the same factor
(SmoothQuant, Xiao et al., 2023). SmoothQuant measures the size of a channel on samples. Here it is computed from the
norm's weight and bias, because the normalised input has a variance of about 1.
"""

# O outputs, I inputs: the channels of the norm

from collections.abc import Iterable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor, nn

from llama_adapter.runtime.schemes import arrays
from llama_adapter.runtime.schemes.scheme import dtype_name

# Attribute of a module class: the names of its norms, each with the name of the one linear layer that reads it.
READERS = "norm_readers"


def read_norms(module: nn.Module) -> dict[str, str]:
    """Names of the norms inside `module` that can be balanced -> name of the linear layer that reads each.

    A module's class lists them in its attribute `norm_readers`.
    """
    return {
        f"{prefix}{norm}": f"{prefix}{reader}"
        for name, child in module.named_modules()
        for prefix in (f"{name}." if name else "",)
        for norm, reader in getattr(child, READERS, {}).items()
    }


def balanced(
    tensors: Iterable[tuple[str, Tensor]], norms: Mapping[str, str], *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The float tensors of a state dict with the `norms` balanced, for norms that will be stored in `dtype`.

    A balanced norm is in `dtype`, and the weights that read it are in float32. Factors are powers of two, so the model
    computes exactly the same function. A norm is held back until the weights that read it arrive. Tensors that need no
    change are passed on unchanged.
    """
    owners = {part: norm for norm, reader in norms.items() for part in _parts(norm, reader)}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if (norm := owners.get(name)) is None:
            yield name, tensor
        else:
            held = waiting.setdefault(norm, {})
            held[name] = tensor
            if len(held) == len(_parts(norm, norms[norm])):
                _balance(waiting.pop(norm), *_parts(norm, norms[norm]), dtype=dtype)
                yield from ((part, held.pop(part)) for part in list(held))
        del tensor
    for held in waiting.values():  # norms for which some tensors did not arrive
        yield from held.items()


def balancing_factors(weight_I: Tensor, bias_I: Tensor, weight_OI: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See `runtime.schemes.arrays.balancing_factors`; on the device of the weight."""
    floats = (tensor.detach().float().cpu().numpy() for tensor in (weight_I, bias_I, weight_OI))
    return torch.from_numpy(arrays.balancing_factors(*floats, dtype=dtype_name(dtype))).to(weight_I.device)


def _balance(held: MutableMapping[str, Tensor], weight: str, bias: str, columns: str, *, dtype: torch.dtype) -> None:
    factors_I = balancing_factors(held[weight], held[bias], held[columns], dtype=dtype)
    if bool((factors_I != 1).any()):
        held[weight], held[bias] = ((held[name].float() / factors_I).to(dtype) for name in (weight, bias))
        held[columns] = held[columns].float() * factors_I


def _parts(norm: str, reader: str) -> tuple[str, str, str]:
    return f"{norm}.weight", f"{norm}.bias", f"{reader}.weight"
