"""State dicts in a scheme: which tensors they have, and generators that convert them tensor by tensor.

The generators keep no reference to a tensor that they have yielded.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

import torch
from torch import Tensor, nn

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, Precision, finer
from llama_adapter.runtime.schemes.balancing import balanced, read_norms
from llama_adapter.runtime.schemes.packed import PACKED, beside, scheme_of_kind
from llama_adapter.runtime.schemes.scheme import Scheme, TensorForm, find_scheme, scheme_of
from llama_adapter.runtime.tensor_files.arrays import list_keys

# Returns the required part of a stored tensor, given its name and the tensor.
Take = Callable[[str, Tensor], Tensor]
# Attribute of a module class: names of the linear weights that have the precision `finer` in new models.
FINER = "finer_weights"


def all_of(_name: str, tensor: Tensor) -> Tensor:
    """A `Take` that returns the whole tensor."""
    return tensor


def linear_weights(module: nn.Module) -> frozenset[str]:
    """Names of the weights that a scheme applies to: those of all linear layers, but no embedding or convolution."""
    return frozenset(linear_shapes(module))


def linear_shapes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Names of the same weights, with their numbers of outputs and inputs."""
    return {
        f"{name}.weight": (child.out_features, child.in_features)
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }


def new_finer_weights(module: nn.Module, precision: Precision) -> dict[str, Precision]:
    """Names of the weights that are finer in a new model of `precision`, with the precision of each."""
    return {} if finer(precision) == precision else dict.fromkeys(getattr(module, FINER, ()), finer(precision))


def linear_precisions(
    module: nn.Module, precision: Precision, *, finer_weights: Mapping[str, Precision] | None = None
) -> dict[str, Precision]:
    """Names of all linear weights, with the precision of each in a model of `precision`.

    `finer_weights` are the weights with another precision; None: those of a new model.
    """
    finer_weights = new_finer_weights(module, precision) if finer_weights is None else finer_weights
    return {name: finer_weights.get(name, precision) for name in linear_shapes(module)}


def stored_forms(
    module: nn.Module,
    *,
    dtype: torch.dtype,
    precision: Precision = FLOAT,
    finer_weights: Mapping[str, Precision] | None = None,
) -> dict[str, TensorForm]:
    """Names and forms of the tensors of `module` in a precision. Tensors that are not quantised are in `dtype`.

    `finer_weights` are those of `linear_precisions`.
    """
    precisions = linear_precisions(module, precision, finer_weights=finer_weights)
    forms: dict[str, TensorForm] = {}
    for name, tensor in module.state_dict().items():
        shape = tuple(tensor.shape)
        parts = find_scheme(precisions.get(name, FLOAT)).forms(shape, dtype)
        forms |= {name + suffix: form for suffix, form in parts.items()}
    return forms


def precision_of(tensors: Mapping[str, Tensor]) -> Precision:
    """The precision of a state dict: that of its weights with the fewest bits."""
    found = {scheme.name for _, scheme in _quantised(tensors)}
    return next((name for name in reversed(QUANTISED) if name in found), FLOAT)


def loaded_bytes(form: TensorForm, *, dtype: torch.dtype, is_dequantised: bool) -> int:
    """Memory of a tensor on a device, in bytes; dequantised weights become `dtype`."""
    scheme = scheme_of(form.dtype) if is_dequantised else None
    itemsize = form.dtype.itemsize if scheme is None else scheme.weights_per_item * dtype.itemsize
    return math.prod(form.shape) * itemsize


def drained(state: MutableMapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `state`. Each is removed from `state` first, so that the caller can release it."""
    for name in list(state):
        yield name, state.pop(name)


def quantise(
    tensors: Iterable[tuple[str, Tensor]], module: nn.Module, *, dtype: torch.dtype, precision: Precision
) -> Iterator[tuple[str, Tensor]]:
    """Float tensors of `module` in a precision: stored tensors of linear weights, all others in `dtype`.

    Norms are first balanced with the weights that read them. Raises CheckpointError for a weight that its
    scheme cannot hold.
    """
    precisions: Mapping[str, Precision] = {}
    if precision != FLOAT:
        precisions = linear_precisions(module, precision)
        tensors = balanced(tensors, read_norms(module), dtype=dtype)
    for name, tensor in tensors:
        if name not in precisions:
            parts = {"": tensor.to(dtype)}
            del tensor
            yield name, parts.pop("")
            continue
        scheme = find_scheme(precisions[name])
        try:
            parts = dict(scheme.quantise(tensor))
            del tensor
        except ValueError as error:
            raise CheckpointError(
                f"`{name}` cannot have {scheme.title} weights: {error}",
                hint="`llama-adapter doctor` looks at all weights; if they are sound, use another precision",
            ) from None
        for suffix in list(parts):
            yield name + suffix, parts.pop(suffix)


def dequantise(
    tensors: Mapping[str, Tensor], *, dtype: torch.dtype, take: Take = all_of
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a quantised state dict as plain tensors, all in `dtype`.

    `take` returns the part of each tensor that is used.
    """
    schemes = dict(_quantised(tensors))
    parts = _part_names(schemes)
    for name, tensor in tensors.items():
        if name in schemes:
            stored = {suffix: take(name + suffix, tensors[name + suffix]) for suffix in schemes[name].suffixes}
            yield name, schemes[name].dequantise(stored).to(dtype)
        elif name not in parts:
            yield name, take(name, tensor).to(dtype)


def cast(tensors: Mapping[str, Tensor], *, dtype: torch.dtype, take: Take = all_of) -> Iterator[tuple[str, Tensor]]:
    """The tensors in `dtype`, except those of quantised weights, which keep their form."""
    parts = _part_names(dict(_quantised(tensors)))
    for name, tensor in tensors.items():
        yield name, take(name, tensor).to(tensor.dtype if name in parts else dtype)


def convert_precision(
    tensors: Mapping[str, Tensor], module: nn.Module, *, dtype: torch.dtype, wanted: Precision
) -> dict[str, Tensor]:
    """The state dict of `module` in a scheme and `dtype`. Tensors that need no conversion are shared.

    Raises CheckpointError as `quantise`.
    """
    return dict(converted(tensors, module, dtype=dtype, wanted=wanted))


def converted(
    tensors: Mapping[str, Tensor], module: nn.Module, *, dtype: torch.dtype, wanted: Precision, take: Take = all_of
) -> Iterator[tuple[str, Tensor]]:
    """As `convert_precision`, tensor by tensor. `take` returns the part of each tensor that is converted.

    Weights that are stored as they are wanted are not rounded again. They come last.
    """
    stored = precision_of(tensors)
    if stored == wanted:
        return cast(tensors, dtype=dtype, take=take)
    if wanted == FLOAT:
        return dequantise(tensors, dtype=dtype, take=take)
    if stored == FLOAT:
        return quantise(
            ((name, take(name, tensor)) for name, tensor in tensors.items()), module, dtype=dtype, precision=wanted
        )
    precisions = linear_precisions(module, wanted)
    kept = _part_names({name: scheme for name, scheme in _quantised(tensors) if scheme.name == precisions.get(name)})
    others = {name: tensor for name, tensor in tensors.items() if name not in kept}
    rounded = quantise(dequantise(others, dtype=dtype, take=take), module, dtype=dtype, precision=wanted)
    return itertools.chain(rounded, ((name, take(name, tensors[name])) for name in tensors if name in kept))


def check_stored(tensors: Mapping[str, Tensor], *, path: Path, hint: str) -> None:
    """Raise CheckpointError for stored tensors that are damaged, such as scales of 0."""
    faults: dict[str, list[str]] = {}
    for name, scheme in _quantised(tensors):
        for suffix in scheme.suffixes:
            if fault := scheme.fault(suffix, tensors[name + suffix]):
                faults.setdefault(fault, []).append(name + suffix)
    for name in tensors:
        weight, is_packed, kind = name.partition(PACKED)
        for suffix in beside(kind) if is_packed else ():
            if fault := scheme_of_kind(kind).fault(suffix, tensors[weight + suffix]):
                faults.setdefault(fault, []).append(weight + suffix)
    for fault, names in faults.items():
        raise CheckpointError(f"`{path}` has {fault}, in {list_keys(names)}", hint=hint)


def _quantised(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Scheme]]:
    """Names of the quantised weights, with their scheme. Packed weights are not among them."""
    for name, tensor in tensors.items():
        if PACKED not in name and (scheme := scheme_of(tensor.dtype)) is not None:
            yield name, scheme


def _part_names(schemes: Mapping[str, Scheme]) -> set[str]:
    return {name + suffix for name, scheme in schemes.items() for suffix in scheme.suffixes}
