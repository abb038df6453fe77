"""The encoder of `encode`, and its description in prefix files. An exported encoder runs without torch."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llama_adapter.app.models.early import check_encoder_exists
from llama_adapter.app.models.exported import encoder_graph, encoder_identity
from llama_adapter.app.models.spec import CaptionerSpec, tokens_error
from llama_adapter.app.pictures.prefixes.file import Encoding, StoredPicture
from llama_adapter.llm.runners.base import Runner
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.vision.backends.base import VisionBackend, as_array
from llama_adapter.vision.backends.exported import open_encoder
from llama_adapter.vision.config import ConnectorConfig, VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpenEncoder:
    """An open picture encoder, and its description in prefix files."""

    encoding: Encoding
    vision: VisionBackend
    device: str
    runner: Runner | None = None  # projects keys and values; None: only visual queries are kept
    notes: tuple[str, ...] = ()  # for the user

    def encode(self, pixels: Sequence[np.ndarray]) -> list[StoredPicture]:
        """Encode pixels, each (S, S, 3) as the reader returns them."""
        query_BQD = self.vision.encode(np.stack(pixels))
        queries = as_array(query_BQD)
        if self.runner is None:
            return [StoredPicture(query_QD) for query_QD in queries]
        prefixes = self.runner.project_prefix(query_BQD)
        pairs = ((as_array(part[:, 0]) for part in prefix) for prefix in prefixes)
        return [StoredPicture(query_QD, *pair) for query_QD, pair in zip(queries, pairs, strict=True)]


def open_exported(spec: CaptionerSpec, how: Mapping[str, Any]) -> tuple[CaptionerSpec, OpenEncoder]:
    """Open an exported encoder. No other file of the model is needed.

    Raises GraphError, and UsageError for the encoder of a model that sees pictures as tokens.
    """
    check_encoder_exists(spec)
    exported = open_encoder(encoder_graph(spec))
    if exported.card is None:
        exported.close()
        raise GraphError(
            f"The encoder `{spec.encoder}` does not name its model, so its prefixes would go with none",
            hint="export it with `llama-adapter export onnx`, and for an OM go on with `export om`",
        )
    card = exported.card
    if isinstance(card.vision.query, ConnectorConfig):
        exported.close()
        raise tokens_error(card.name)
    encoding = Encoding(
        name=card.name,
        digest=encoder_digest(card.vision, card.fingerprint),
        vision=card.vision,
        fingerprint=card.fingerprint,
        dtype=card.dtype,
        precision=FLOAT,
        encoder=encoder_identity(spec, channel_order=exported.channel_order),
        **how,
    )
    spec = completed(spec, encoding, device=exported.name)
    return spec, OpenEncoder(encoding=encoding, vision=exported, device=spec.device)


def completed(spec: CaptionerSpec, encoding: Encoding, *, device: str) -> CaptionerSpec:
    """The spec with the values that it left open."""
    order = encoding.vision.channel_order
    return dataclasses.replace(
        spec, vision=spec.vision_kind, device=device, dtype=encoding.dtype, channel_order=order, mode="eager"
    )


def encoder_digest(config: VisionConfig, halves: Mapping[str, str]) -> str:
    """Replaces the model's digest if the language model is not available."""
    return hashlib.sha256(json.dumps([config.to_dict(), dict(halves)], sort_keys=True).encode()).hexdigest()
