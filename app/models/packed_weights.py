"""Reads the tensors of a bundle in the form that a model needs: as stored, converted, or unpacked."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llama_adapter.app.models.sketch import HalfConfig, expected_forms, sketch
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.packed import PACKED, unpacked
from llama_adapter.runtime.schemes.scheme import find_scheme
from llama_adapter.runtime.schemes.state import Take, all_of, converted, linear_shapes, linear_weights, quantise

# Gives the layout in which a device uses packed weights, for a precision and the dtype of activations; None: it cannot.
TakePacked = Callable[[Precision, torch.dtype], PackedLayout | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """How the tensors of a bundle are stored."""

    layout: PackedLayout | None  # None: weights are not packed
    precision: Precision
    dtype: torch.dtype
    take_packed: TakePacked | None

    def is_taken(self, wanted: Precision, dtype: torch.dtype) -> bool:
        """Whether a model in the precision `wanted` and in `dtype` uses the packed weights as they are."""
        if self.layout is None or self.take_packed is None or wanted != self.precision:
            return False
        if wanted == FLOAT and dtype != self.dtype:
            return False
        return self.layout.fits(self.take_packed(wanted, dtype), wanted)

    def plain(self, state: Mapping[str, Tensor], config: HalfConfig) -> Iterator[tuple[str, Tensor]]:
        """The tensors of encoder or decoder as they are stored, but with packed weights unpacked."""
        return (
            unpacked(state, linear_shapes(sketch(config)), layout=self.layout) if self.layout else iter(state.items())
        )

    def tensors(
        self,
        state: Mapping[str, Tensor],
        config: HalfConfig,
        *,
        dtype: torch.dtype,
        wanted: Precision,
        take: Take = all_of,
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of encoder or decoder in the precision `wanted` and in `dtype`, block after block.

        If tensors are not packed, only the part that `take` returns is read of each.
        """
        forms = expected_forms(config, dtype=self.dtype, precision=self.precision, packed=self.layout)
        module = sketch(config)
        in_order = {name: state[name] for name in forms}
        if self.layout is None:
            return converted(in_order, module, dtype=dtype, wanted=wanted, take=take)
        if self.is_taken(wanted, dtype):
            return self._cast(in_order.items(), module, dtype=dtype)
        plain = unpacked(in_order, linear_shapes(module), layout=self.layout)
        if wanted == self.precision:
            return self._cast(plain, module, dtype=dtype)
        if self.precision == FLOAT:
            return quantise(plain, module, dtype=dtype, precision=wanted)
        return converted(dict(plain), module, dtype=dtype, wanted=wanted)

    def _cast(
        self, tensors: Iterable[tuple[str, Tensor]], module: nn.Module, *, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors in `dtype`, except those of packed and quantised weights."""
        scheme = find_scheme(self.precision)
        quantised = linear_weights(module) if scheme.weight_dtype is not None else ()
        kept = {name + suffix for name in quantised for suffix in scheme.suffixes}
        for name, tensor in tensors:
            cast = [tensor if name in kept or PACKED in name else tensor.to(dtype)]
            del tensor
            yield name, cast.pop()
