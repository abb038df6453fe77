"""State dicts in a scheme: which tensors there are, and passes that convert them, tensor by tensor."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.scheme import Scheme, TensorForm, find_scheme, scheme_of
from llama_adapter.runtime.tensor_files.files import list_keys


def linear_weights(module: nn.Module) -> frozenset[str]:
    """Names of the weights that a scheme applies to: those of all linear layers, but no embedding or convolution."""
    return frozenset(f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.Linear))


def stored_forms(module: nn.Module, *, dtype: torch.dtype, precision: Precision = FLOAT) -> dict[str, TensorForm]:
    """Names and forms of the tensors of `module` in a scheme; all that is not quantised is in `dtype`."""
    scheme, linears = find_scheme(precision), linear_weights(module)
    forms: dict[str, TensorForm] = {}
    for name, tensor in module.state_dict().items():
        shape = tuple(tensor.shape)
        parts = scheme.forms(shape, dtype) if name in linears else {"": TensorForm(shape, dtype)}
        forms |= {name + suffix: form for suffix, form in parts.items()}
    return forms


def precision_of(tensors: Mapping[str, Tensor]) -> Precision:
    """The precision of a state dict."""
    found = next((scheme for tensor in tensors.values() if (scheme := scheme_of(tensor.dtype)) is not None), None)
    return FLOAT if found is None else found.name


def loaded_bytes(tensors: Iterable[Tensor], *, dtype: torch.dtype, is_dequantised: bool) -> int:
    """Memory of tensors on a device, in bytes; dequantised weights become `dtype`."""
    total = 0
    for tensor in tensors:
        scheme = scheme_of(tensor.dtype) if is_dequantised else None
        itemsize = tensor.itemsize if scheme is None else scheme.weights_per_item * dtype.itemsize
        total += tensor.numel() * itemsize
    return total


def quantise(
    tensors: Iterable[tuple[str, Tensor]], *, linears: Collection[str], dtype: torch.dtype, precision: Precision
) -> Iterator[tuple[str, Tensor]]:
    """Float tensors in a scheme: those named in `linears` as its stored tensors, all others in `dtype`.

    Raises CheckpointError for a weight that is not finite.
    """
    scheme = find_scheme(precision)
    for name, tensor in tensors:
        if scheme.weight_dtype is None or name not in linears:
            yield name, tensor.to(dtype)
            continue
        try:
            parts = scheme.quantise(tensor)
        except ValueError:
            raise CheckpointError(
                f"`{name}` has numbers that are infinite or none at all, which {scheme.title} weights cannot hold",
                hint="the file is damaged, or its training had diverged; `llama-adapter doctor` looks at all of them",
            ) from None
        yield from ((name + suffix, part) for suffix, part in parts.items())


def dequantise(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a quantised state dict as plain ones, all in `dtype`."""
    schemes = dict(_quantised(tensors))
    parts = _part_names(schemes)
    for name, tensor in tensors.items():
        if name in schemes:
            stored = {suffix: tensors[name + suffix] for suffix in schemes[name].suffixes}
            yield name, schemes[name].dequantise(stored).to(dtype)
        elif name not in parts:
            yield name, tensor.to(dtype)


def cast(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors in `dtype`, except those of quantised weights, which keep their form."""
    parts = _part_names(dict(_quantised(tensors)))
    for name, tensor in tensors.items():
        yield name, tensor if name in parts else tensor.to(dtype)


def convert_precision(
    tensors: Mapping[str, Tensor], module: nn.Module, *, dtype: torch.dtype, wanted: Precision
) -> dict[str, Tensor]:
    """The state dict of `module` in a scheme and `dtype`. Tensors that need no conversion are shared.

    Raises CheckpointError as `quantise`.
    """
    stored = precision_of(tensors)
    if stored == wanted:
        return dict(cast(tensors, dtype=dtype))
    plain = tensors.items() if stored == FLOAT else dequantise(tensors, dtype=dtype)
    if wanted == FLOAT:
        return dict(plain)
    return dict(quantise(plain, linears=linear_weights(module), dtype=dtype, precision=wanted))


def check_stored(tensors: Mapping[str, Tensor], *, path: Path, hint: str) -> None:
    """Raise CheckpointError for stored tensors that are damaged, such as scales of 0."""
    faults: dict[str, list[str]] = {}
    for name, scheme in _quantised(tensors):
        for suffix in scheme.suffixes:
            if fault := scheme.fault(suffix, tensors[name + suffix]):
                faults.setdefault(fault, []).append(name + suffix)
    for fault, names in faults.items():
        raise CheckpointError(f"`{path}` has {fault}, in {list_keys(names)}", hint=hint)


def foreign_weights(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Names of quantised weights with values that our own `quantize` never writes, by what they hold."""
    found: dict[str, list[str]] = {}
    for name, scheme in _quantised(tensors):
        if value := scheme.foreign(tensors[name]):
            found.setdefault(f"{scheme.title} weights of {value}", []).append(name)
    return found


def _quantised(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Scheme]]:
    """Names of the quantised weights, with their scheme."""
    for name, tensor in tensors.items():
        if (scheme := scheme_of(tensor.dtype)) is not None:
            yield name, scheme


def _part_names(schemes: Mapping[str, Scheme]) -> set[str]:
    return {name + suffix for name, scheme in schemes.items() for suffix in scheme.suffixes}
