"""Exported graphs on disk, read without torch: the folder that `export decoder` writes, and the encoder of a spec."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.exported.card import CARD_FILE, EXPORT_AGAIN, ExportCard, check_files, read_card
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.device_names import om_device_id
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import is_same
from llama_adapter.runtime.graphs.onnx_provider import CPU, provider_of_device
from llama_adapter.runtime.graphs.open_session import GraphKind, GraphSpec
from llama_adapter.vision.card import read_vision_config
from llama_adapter.vision.config import ChannelOrder, VisionConfig
from llama_adapter.vision.out_of_distribution import OodDetector, read_familiarity

ENCODER_FILE: Final = "encoder.onnx"
MINDIR: Final = "mindir"  # format of graphs for MindSpore
FOR_ATC: Final = "onnx-atc"  # format of graphs that ATC compiles to OMs
FAMILIAR_FILE: Final = "familiar.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """An export folder that was read and checked, except for its graphs."""

    folder: Path
    card: ExportCard
    tokenizer: Tokenizer
    ood_detector: OodDetector | None
    vision: VisionConfig | None = None  # of an encoder without a card, see `ExportCard.vision`

    @property
    def encoder(self) -> Path | None:
        """The picture encoder in the folder, if it has one."""
        name = ENCODER_FILE if self.card.format != MINDIR else str((self.card.settings or {}).get("encoder"))
        return self.folder / name if name in self.card.files else None

    @property
    def identity(self) -> str:
        """Identifies the export in records, by the model, the decoder's graphs and the number formats."""
        card = self.card
        parts = [card.digest, card.decoder, card.dtype, card.precision, card.channel_order]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_exported_model(folder: str | Path) -> ExportedModel:
    """Read an export folder. Raises GraphError and CheckpointError if files are missing, damaged, or of two exports."""
    place = Path(folder)
    card = read_card(place)
    check_files(card, place)
    tokenizer = Tokenizer.load_stored(place, card.files)
    config = card.config
    if tokenizer.vocab_size != config.vocab_size:
        raise GraphError(
            f"The tokenizer in `{place}` has {tokenizer.vocab_size} pieces, and its decoder {config.vocab_size} tokens",
            hint=f"{CARD_FILE} and {tokenizer.pieces.file_name} are of two exports: copy the whole folder again",
        )
    detector = None
    if FAMILIAR_FILE in card.files:
        detector = read_familiarity(place / FAMILIAR_FILE, num_queries=config.num_queries, width=config.dim)
    try:
        vision = None if card.vision is None else read_vision_config(card.vision)
    except ValueError as error:
        raise GraphError(f"The card `{place / CARD_FILE}` cannot be read: {error}", hint=EXPORT_AGAIN) from None
    return ExportedModel(folder=place, card=card, tokenizer=tokenizer, ood_detector=detector, vision=vision)


def output_name(pictures: PictureFormat | None) -> str:
    """What a picture encoder makes, in the words of a model with an adapter or with pictures as tokens."""
    return "visual queries" if pictures is None else "tokens"


def half_name(half: str, pictures: PictureFormat | None) -> str:
    """What a half of the picture encoder is, in the words of a model with an adapter or with pictures as tokens."""
    words = {"clip": "CLIP", "query": "visual blocks"}
    if pictures is not None:
        words = {"clip": "tower's weights", "query": "connector's weights"}
    return words.get(half, half)


def check_fingerprint(found: Mapping[str, str], exported: ExportedModel, *, what: str, name: str) -> None:
    """Raise GraphError unless an encoder's fingerprint is that of the decoder's model."""
    for half, own in exported.card.fingerprint.items():
        if half in found and not is_same(found[half], own):
            its = half_name(half, exported.card.picture_format)
            raise GraphError(
                f"{what} is that of {name}, and its {its} are not those that the decoder in "
                f"`{exported.folder}`, of {exported.card.name}, was trained with",
                hint="export both from one model",
            )


def encoder_graph(spec: CaptionerSpec, *, own_process: bool = False) -> GraphSpec:
    """The graph of the encoder. An OM runs on the decoder's device, if that is an NPU and the spec names no other.

    Raises UsageError for options that the execution provider of an ONNX encoder does not know.
    """
    assert spec.encoder is not None, "the spec checks that there is one"
    kind: GraphKind = "onnx" if spec.vision_kind == "onnx" else "om"
    provider, device_id = CPU, 0
    if kind == "onnx":
        device = "cpu" if spec.encoder_device is None else str(spec.encoder_device)
        provider = provider_of_device(device, options=spec.provider_option, config=spec.provider_config)
    elif spec.encoder_device is not None:
        device_id = om_device_id(spec.encoder_device)
    else:
        with suppress(ValueError):  # of a device that runs no OM
            device_id = om_device_id(spec.device)
    return GraphSpec(
        kind=kind,
        path=spec.encoder,
        device_id=device_id,
        provider=provider,
        own_process=spec.encoder_process or own_process,
    )


def encoder_files(spec: CaptionerSpec) -> list[Path]:
    """The file of an exported encoder, or the OM files of its folder."""
    assert spec.encoder is not None
    place = Path(spec.encoder)
    return sorted(place.glob("*.om")) if place.is_dir() else [place]


def encoder_identity(spec: CaptionerSpec, *, channel_order: ChannelOrder = "rgb") -> str:
    """Identifies an exported encoder in records, by the sizes and times of its files but not by their names.

    `channel_order` is the order of the pixels that the encoder receives.
    """
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in encoder_files(spec))]
    given = () if channel_order == "rgb" else (channel_order,)
    return hashlib.sha256(repr((spec.vision_kind, stats, *given)).encode()).hexdigest()[:16]
