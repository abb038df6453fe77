"""The description of a scheme, and how it is looked up."""

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_adapter.runtime.schemes import PRECISIONS, Precision

# Stored tensors of one linear weight, by the suffix that follows the weight's name: "" for the weight itself.
Parts = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How the weights (out, in) of linear layers are stored."""

    name: Precision
    title: str  # for people, as in "8-bit weights"
    weight_dtype: torch.dtype | None  # dtype of the stored weight, unique among schemes; None: the model's float type
    weights_per_item: int  # weights in one element of the stored tensor
    suffixes: tuple[str, ...]  # of the stored tensors of a weight
    forms: Callable[[tuple[int, ...], torch.dtype], Mapping[str, TensorForm]]  # (shape, float type) -> by suffix
    quantise: Callable[[Tensor], Parts]  # raises ValueError, whose text is a clause, for a weight that it cannot hold
    dequantise: Callable[[Parts], Tensor]  # to float32 (out, in)
    fault: Callable[[str, Tensor], str]  # (suffix, stored tensor) -> how it is damaged, or an empty string
    # What `calibrate` needs to know of a layer's inputs: (result for earlier inputs or None, inputs (N, in)) -> result.
    # For int4 it is XᵀX of all inputs X, float32 (in, in), and for int8 their largest magnitude, (1,).
    observe: Callable[[Tensor | None, Tensor], Tensor] | None = None
    # As `quantise`, for these inputs: int4 minimises the error of outputs, int8 adds the scale of inputs.
    calibrate: Callable[[Tensor, Tensor], Parts] | None = None


@functools.cache
def find_scheme(name: Precision) -> Scheme:
    """The scheme of a name in the table; its module is imported at first use."""
    found: Scheme = importlib.import_module(f"{__package__}.{name}").SCHEME
    return found


def scheme_of(dtype: torch.dtype) -> Scheme | None:
    """The scheme that stores weights in `dtype`; None for plain float weights."""
    return next((scheme for scheme in map(find_scheme, PRECISIONS) if scheme.weight_dtype == dtype), None)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as manifests and flags write it, such as float16."""
    return str(dtype).removeprefix("torch.")
