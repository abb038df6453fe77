"""Balances norms with the weights that read them, before these are rounded, so that activations have no outliers.

A channel of a norm is divided by a factor, and the column of the weights behind it multiplied by the same one
(SmoothQuant, Xiao et al., 2023). There, samples say how large a channel is. Here its own weight and bias do, since what
a norm scales has a variance of about 1.
"""

# O outputs, I inputs: the channels of the norm

from collections.abc import Iterable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor, nn

# Of a module class: names of its norms, and of the one linear layer that reads each.
READERS = "norm_readers"


def read_norms(module: nn.Module) -> dict[str, str]:
    """The norms inside `module` that can be balanced, with the linear layer that reads each; classes name them."""
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

    Norms come in `dtype` then, their weights in float32. Factors are powers of two, so the function is the same to the
    bit of every float. A norm is kept back until the weight behind it comes; what needs no change is given as it is.
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
    for held in waiting.values():  # whose other parts never came
        yield from held.items()


def balancing_factors(weight_I: Tensor, bias_I: Tensor, weight_OI: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Powers of two, float32 (I,): the channels of a norm are divided by them, and the columns behind it multiplied.

    Then the spread of a channel, sqrt(weight^2 + bias^2), and the root mean square of its column are as nearly equal as
    powers of two make them, up to one number for all channels. Channels stay that have no spread or are read by zeros,
    with numbers that are not finite, and those that `dtype` could no longer hold exactly.
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
