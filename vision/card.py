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
_SIGNS_PER_TENSOR = 4096


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

    A digest of the signs of each tensor's first numbers: rounding to half precision keeps a sign, so a float16 export
    is recognised as that of a float32 checkpoint. Halves that `state` does not hold are left out.
    """
    digests = {}
    for half in ("clip", "query"):
        digest = hashlib.sha256()
        names = sorted(name for name in state if name.startswith(half + "."))
        for name in names:
            tensor = state[name]
            signs = torch.signbit(tensor.detach().flatten()[:_SIGNS_PER_TENSOR].float().cpu()).numpy()
            digest.update(f"{name} {list(tensor.shape)} ".encode())
            digest.update(np.packbits(signs).tobytes())
        if names:
            digests[half] = digest.hexdigest()[:32]
    return digests
