"""What an exported encoder says of itself: its sizes, its number type, and which weights are in it.

An ONNX file carries its card in its metadata, an OM file in a side-car. Writing and reading files is done elsewhere.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vision.config import VisionConfig
from vision.errors import EncoderError

EncoderDtype = Literal["float32", "float16"]

INPUT, OUTPUT = "input", "output"  # names in the graph, as in the Ascend guide
METADATA_KEY = "llama_adapter_encoder"  # of the card in an ONNX file's metadata
FORMAT_VERSION = 1
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
        if type(self.name) is not str or not self.name.isprintable():
            raise ValueError(f"name must be a text that can be printed, got {self.name!r}")
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
        """Inverse of `to_json`; raises EncoderError naming `file` for what is no card, or one of another version."""
        try:
            values: dict[str, Any] = json.loads(text)
            version = values.pop("version")
            if version == FORMAT_VERSION:
                fingerprints = {str(half): str(digest) for half, digest in values.pop("fingerprint").items()}
                return cls(vision=VisionConfig.from_dict(values.pop("vision")), fingerprint=fingerprints, **values)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise EncoderError(
                f"What `{file}` says of itself cannot be read: {error}",
                hint="export the encoder again with `llama-adapter export`",
            ) from None
        raise EncoderError(
            f"`{file}` describes itself in version {version!r}, and this program reads {FORMAT_VERSION}",
            hint="export the encoder again with `llama-adapter export`",
        )


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
