"""Balances norms with the linear layers that read them, before weights are rounded, so that activations lose outliers.

A channel of a norm is divided by a factor, and the column of the next layer's weights is multiplied by the same factor
(SmoothQuant, Xiao et al., 2023). SmoothQuant measures the size of a channel on samples. Here it is computed from the
norm's weight and bias, because the normalised input has a variance of about 1.
"""

# O outputs, I inputs: the channels of the norm

from collections.abc import Iterable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor, nn

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
    """Powers of two, float32 (I,), to divide the channels of a norm by, and to multiply the columns that read them by.

    They make the spread of a channel, sqrt(weight^2 + bias^2), and the root mean square of its column as nearly equal
    as powers of two can, up to one constant for all channels. A factor is 1 if the channel's spread or its column is 0,
    if it has numbers that are not finite, or if `dtype` could not hold the divided numbers exactly.
    """
    spread_I = (weight_I.float().square() + bias_I.float().square()).sqrt()
    column_I = weight_OI.float().square().mean(0).sqrt()
    exponent_I = (spread_I.log2() - column_I.log2()) / 2
    is_known_I = exponent_I.isfinite()
    factors_I = torch.ones_like(spread_I)
    factors_I[is_known_I] = torch.exp2((exponent_I - exponent_I[is_known_I].mean()).round())[is_known_I]
    for part_I in (weight_I, bias_I):
        is_exact_I = (part_I.float() / factors_I).to(dtype).float() * factors_I == part_I.to(dtype).float()
        factors_I = torch.where(is_exact_I, factors_I, 1.0)
    return factors_I


def _balance(held: MutableMapping[str, Tensor], weight: str, bias: str, columns: str, *, dtype: torch.dtype) -> None:
    factors_I = balancing_factors(held[weight], held[bias], held[columns], dtype=dtype)
    if bool((factors_I != 1).any()):
        held[weight], held[bias] = ((held[name].float() / factors_I).to(dtype) for name in (weight, bias))
        held[columns] = held[columns].float() * factors_I


def _parts(norm: str, reader: str) -> tuple[str, str, str]:
    return f"{norm}.weight", f"{norm}.bias", f"{reader}.weight"
