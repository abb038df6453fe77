"""The description of an exported graph: its inputs, its outputs and its card.

The card has the sizes of the model's part, its dtype, opset and weights' fingerprint. An ONNX file stores the card in
its metadata, an OM file in its side-car.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.json_object import check_fields, check_mapping, read_object, take_version
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS

if TYPE_CHECKING:
    from torch import Tensor

GraphDtype = Literal["float32", "float16"]

METADATA_KEY: Final = "llama_adapter_encoder"  # of the card in an ONNX file's metadata
FORMAT_VERSION: Final = 1
_CONFIG: Final = "vision"  # the field of `config`: the part of the model
_FIELDS: Final = {"name": str, "dtype": str, "opset": int, "fingerprint": dict, _CONFIG: dict}
_EXPORT_AGAIN: Final = "export the model again with `llama-adapter export`"
_NUMBERS_PER_TENSOR: Final = 65_536
_ROUNDING, _TINY = 5e-3, 1e-7  # relative error of a mean in half precision; numbers that float16 rounds to zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """An input or an output of a graph. -1 stands for a dynamic size."""

    name: str = ""
    dtype: str  # numpy's name, or the file's name of a type that numpy lacks
    shape: tuple[int, ...]
    symbols: tuple[str, ...] = field(default=(), compare=False)  # names of the dynamic sizes, in order, if known

    @classmethod
    def of(cls, array: np.ndarray) -> "Port":
        """The type and shape of an array."""
        return cls(dtype=array.dtype.name, shape=array.shape)

    @property
    def free_dims(self) -> tuple[int, ...]:
        """Indices of the dynamic dimensions."""
        return tuple(dim for dim, size in enumerate(self.shape) if size < 0)

    def fits(self, other: "Port") -> bool:
        """Whether another port or an array (`of`) has this type and these sizes."""
        sizes_fit = all(want in (-1, have) for want, have in zip(self.shape, other.shape, strict=False))
        return other.dtype == self.dtype and len(other.shape) == len(self.shape) and sizes_fit

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('any' if size < 0 else str(size) for size in self.shape)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCard:
    """The stored description of a graph."""

    name: str  # the model's name, for people
    config: Mapping[str, Any]  # its sizes as plain JSON; the package `vision` reads it
    dtype: GraphDtype
    opset: int
    fingerprint: Mapping[str, str]  # of the weights, see the function `fingerprint`

    def __post_init__(self) -> None:
        if type(self.name) is not str or UNSAFE_ON_TERMINALS.search(self.name):
            raise ValueError(f"name must be a text without control characters, got {self.name!r}")
        if type(self.opset) is not int:
            raise ValueError(f"opset must be a whole number, got {self.opset!r}")
        if self.dtype not in get_args(GraphDtype):
            raise ValueError(f"dtype must be float32 or float16, got {self.dtype!r}")

    def to_json(self) -> str:
        """The text that is stored in a file."""
        values = {
            "version": FORMAT_VERSION,
            "name": self.name,
            _CONFIG: self.config,
            "dtype": self.dtype,
            "opset": self.opset,
            "fingerprint": dict(self.fingerprint),
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str, *, file: str) -> "GraphCard":
        """Inverse of `to_json`. Raises GraphError, which names `file`, for damage and for other versions."""
        try:
            values = read_object(text)
            take_version(values, FORMAT_VERSION)
            check_fields(values, _FIELDS, what="the card")
            check_mapping(values["fingerprint"], str, what="fingerprint")
            return cls(config=values.pop(_CONFIG), **values)
        except ValueError as error:
            raise card_error(file, error) from None


def card_error(file: str, error: ValueError) -> GraphError:
    """The error for a card in `file` that is damaged or of another version."""
    return GraphError(f"The card of `{file}` cannot be read: {error}", hint=_EXPORT_AGAIN)


def find_card(metadata: Mapping[str, str], *, file: str) -> GraphCard | None:
    """The card in an ONNX file's metadata; None for files of other programs. Raises GraphError for damage."""
    return GraphCard.from_json(metadata[METADATA_KEY], file=file) if METADATA_KEY in metadata else None


def check_dtypes(card: GraphCard | None, ports: Iterable[Port], *, file: str) -> None:
    """Raise GraphError unless floating-point inputs and outputs of an ONNX graph have the type of its card."""
    others = sorted({port.dtype for port in ports if port.dtype.startswith("float")} - {card.dtype}) if card else []
    if card is not None and others:
        raise GraphError(
            f"The card of `{file}` says {card.dtype}, and its graph is {', '.join(others)}",
            hint=f"the file was changed after its export: {_EXPORT_AGAIN}",
        )


def fingerprint(state: "Mapping[str, Tensor]") -> dict[str, str]:
    """A text for each half of a state dict that identifies its weights in any dtype. Compare texts with `is_same`.

    A half is the part of a name before its first dot: `clip` and `query` for a `PictureEncoder`. The text has a digest
    of the signs of the first numbers of each tensor, which rounding does not change, and their mean magnitudes, which
    rounding changes little. So a float16 export is recognised as an export of its float32 checkpoint.
    """
    import torch  # imported here, so that a process that only runs graphs does not load torch

    fingerprints = {}
    for half in sorted({name.partition(".")[0] for name in state}):
        digest = hashlib.sha256()
        sizes = []
        for name in sorted(name for name in state if name.startswith(half + ".")):
            numbers = state[name].detach().flatten()[:_NUMBERS_PER_TENSOR].float().cpu()
            digest.update(f"{name} {list(state[name].shape)} ".encode())
            digest.update(np.packbits(torch.signbit(numbers).numpy()).tobytes())
            sizes.append(f"{float(numbers.abs().mean()):.5g}")
        fingerprints[half] = " ".join([digest.hexdigest()[:32], *sizes])
    return fingerprints


def is_same(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints of a half belong to the same weights, up to rounding."""
    if one is None or other is None:
        return one == other
    (one_signs, *one_sizes), (other_signs, *other_sizes) = one.split(" "), other.split(" ")
    try:
        pairs = [(float(a), float(b)) for a, b in zip(one_sizes, other_sizes, strict=True)]
    except ValueError:
        return False
    return one_signs == other_signs and all(abs(a - b) <= _ROUNDING * max(a, b) + _TINY for a, b in pairs)


def is_same_model(one: GraphCard | None, other: GraphCard | None) -> bool:
    """Whether two graphs compute the same function: equal sizes and settings, and the same weights up to rounding."""
    if one is None or other is None:
        return one is other
    halves = one.fingerprint.keys() | other.fingerprint.keys()
    return one.config == other.config and all(
        is_same(one.fingerprint.get(half), other.fingerprint.get(half)) for half in halves
    )
