"""What an exported encoder says of itself: its sizes, its number type, and which weights are in it.

An ONNX file carries its card in its metadata, an OM file in a side-car. Writing and reading files is done elsewhere.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.json_object import check_fields, read_object
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_excerpt
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig

EncoderDtype = Literal["float32", "float16"]

INPUT, OUTPUT = "input", "output"  # names in the graph, as in the Ascend guide
METADATA_KEY = "llama_adapter_encoder"  # of the card in an ONNX file's metadata
FORMAT_VERSION = 1
_FIELDS: Final = {"name": str, "vision": dict, "dtype": str, "opset": int, "fingerprint": dict}
_AGAIN: Final = "export the encoder again with `llama-adapter export`"
_NUMBERS_PER_TENSOR = 65_536
_ROUNDING, _TINY = 5e-3, 1e-7  # of a mean size, by half precision; the second for what float16 rounds to nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCard:
    """Pixels (B, S, S, 3) RGB, 0..255, in `dtype` -> visual query (B, Q, D) in `dtype`.

    Normalisation, and the order of colours that the weights were trained on, are inside the graph.
    """

    name: str  # of the model, for people
    vision: VisionConfig
    dtype: EncoderDtype
    opset: int
    fingerprint: Mapping[str, str]  # of the weights, by half: see `fingerprint`

    def __post_init__(self) -> None:
        if type(self.name) is not str or UNSAFE_ON_TERMINALS.search(self.name):
            raise ValueError(f"name must be a text without control characters, got {self.name!r}")
        if type(self.opset) is not int:
            raise ValueError(f"opset must be a whole number, got {self.opset!r}")
        if self.dtype not in get_args(EncoderDtype):
            raise ValueError(f"dtype must be float32 or float16, got {self.dtype!r}")

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(S, S, 3): one picture as the graph takes it."""
        side = self.vision.clip.image_size
        return side, side, 3

    @property
    def output_shape(self) -> tuple[int, int]:
        """(Q, D): the visual query of one picture."""
        return self.vision.query.num_queries, self.vision.query.output_dim

    def to_json(self) -> str:
        """As stored in a file."""
        values = {
            "version": FORMAT_VERSION,
            "name": self.name,
            "vision": self.vision.to_dict(),
            "dtype": self.dtype,
            "opset": self.opset,
            "fingerprint": dict(self.fingerprint),
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str, *, file: str) -> "EncoderCard":
        """Inverse of `to_json`; raises GraphError naming `file` for what is no card, or one of another version."""
        try:
            values = read_object(text)
            version = values.pop("version", None)
            if type(version) is int and version == FORMAT_VERSION:
                check_fields(values, _FIELDS, what="the card")
                vision = _read_vision(values.pop("vision"))
                check_fields(values["fingerprint"], dict.fromkeys(values["fingerprint"], str), what="fingerprint")
                return cls(vision=vision, **values)
        except ValueError as error:
            raise GraphError(f"What `{file}` says of itself cannot be read: {error}", hint=_AGAIN) from None
        if version is None:
            raise GraphError(f"What `{file}` says of itself cannot be read: it has no version", hint=_AGAIN)
        raise GraphError(
            f"`{file}` describes itself in version {shown_excerpt(repr(version))}, and this program reads "
            f"{FORMAT_VERSION}",
            hint=_AGAIN,
        )


def check_dtypes(card: EncoderCard | None, dtypes: Iterable[str], *, file: str) -> None:
    """Raise GraphError unless a graph that nothing has converted takes and gives the type that its card tells of."""
    others = sorted(set(dtypes) - {card.dtype}) if card is not None else []
    if card is not None and others:
        raise GraphError(
            f"`{file}` says that it is of {card.dtype}, and its graph is of {', '.join(others)}",
            hint=f"the file was changed after its export: {_AGAIN}",
        )


def _read_vision(values: object) -> VisionConfig:
    """Raises ValueError, in words, for everything that is none."""
    check_fields(values, {"clip": dict, "query": dict, "channel_order": str}, what="vision")
    assert isinstance(values, dict)
    for half, kind in (("clip", ClipConfig), ("query", QueryConfig)):
        check_fields(values[half], dict.fromkeys((field.name for field in fields(kind)), int), what=half)
    return VisionConfig.from_dict(values)


def fingerprint(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Names the weights of each half of a `PictureEncoder` state dict, `clip` and `query`, whatever type they are in.

    Of the first numbers of each tensor: a digest of their signs, which no rounding changes, and their mean sizes, which
    rounding changes little; compare with `is_same`. A float16 export is thus recognised as that of a float32
    checkpoint. Halves that `state` does not hold are left out.
    """
    fingerprints = {}
    for half in ("clip", "query"):
        digest = hashlib.sha256()
        names = sorted(name for name in state if name.startswith(half + "."))
        sizes = []
        for name in names:
            numbers = state[name].detach().flatten()[:_NUMBERS_PER_TENSOR].float().cpu()
            digest.update(f"{name} {list(state[name].shape)} ".encode())
            digest.update(np.packbits(torch.signbit(numbers).numpy()).tobytes())
            sizes.append(f"{float(numbers.abs().mean()):.5g}")
        if names:
            fingerprints[half] = " ".join([digest.hexdigest()[:32], *sizes])
    return fingerprints


def is_same(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints of a half are those of the same weights, up to rounding."""
    if one is None or other is None:
        return one == other
    (one_signs, *one_sizes), (other_signs, *other_sizes) = one.split(" "), other.split(" ")
    try:
        pairs = [(float(a), float(b)) for a, b in zip(one_sizes, other_sizes, strict=True)]
    except ValueError:
        return False
    return one_signs == other_signs and all(abs(a - b) <= _ROUNDING * max(a, b) + _TINY for a, b in pairs)
