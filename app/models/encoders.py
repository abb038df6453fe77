"""Exported encoders beside a model: their cards, and whether they are the model's own picture half."""

import hashlib
from pathlib import Path

from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices import EAGER, Backend
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import fingerprint, is_same
from llama_adapter.runtime.graphs.open_session import GraphKind, GraphSpec
from llama_adapter.runtime.graphs.sidecar import read_sidecar, sidecar_path
from llama_adapter.vision.backends.base import VisionBackend
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import VisionConfig

_EXPORT_AGAIN = "export this model's encoder with `llama-adapter export onnx`, and for an OM go on with `export om`"
_HALVES = {"clip": "CLIP", "query": "visual blocks"}


def encoder_spec(spec: CaptionerSpec, *, backend: Backend, mode: str) -> GraphSpec:
    """The exported encoder that `spec` names, beside a decoder on `backend`."""
    assert spec.encoder is not None, "the spec checks that there is one"
    kind: GraphKind = "onnx" if spec.vision_kind == "onnx" else "om"
    shares_device = backend.capabilities.runs_om and kind == "om"
    beside_decoder = (backend.device.index or 0) if shares_device else 0
    return GraphSpec(
        kind=kind,
        path=spec.encoder,
        device_id=beside_decoder if spec.encoder_device is None else spec.encoder_device,
        # An OM's session changes how streams made after it compute, and graphs make theirs late.
        own_process=spec.encoder_process or (shares_device and mode != EAGER),
    )


def check_encoder_exists(spec: CaptionerSpec) -> None:
    """Raise GraphError for an encoder that does not exist, before a device is opened or gigabytes are read."""
    if spec.encoder is not None and not Path(spec.encoder).exists():
        raise GraphError(
            f"The encoder `{spec.encoder}` does not exist",
            hint=f"`llama-adapter export {spec.vision_kind}` makes one",
        )


def encoder_files(spec: CaptionerSpec) -> list[Path]:
    """The file of an exported encoder, or the OM files of its folder."""
    assert spec.encoder is not None
    place = Path(spec.encoder)
    return sorted(place.glob("*.om")) if place.is_dir() else [place]


def encoder_identity(spec: CaptionerSpec) -> str:
    """Identifies an exported encoder in records, by the sizes and times of its files and not by their names."""
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in encoder_files(spec))]
    return hashlib.sha256(repr((spec.vision_kind, stats)).encode()).hexdigest()[:16]


def encoder_bytes(spec: CaptionerSpec, *, own_bytes: int, backend: Backend) -> int:
    """Bytes that the encoder takes on the decoder's device: `own_bytes` of the model's weights, or its files'."""
    if spec.vision_kind == "torch":
        return own_bytes
    if not backend.capabilities.runs_om or spec.vision_kind != "om":
        return 0
    return sum(file.stat().st_size for file in encoder_files(spec))


def om_card(spec: CaptionerSpec) -> EncoderCard | None:
    """The card beside an OM file, or beside the first one of a folder, without opening the OM itself.

    Raises GraphError for a side-car that cannot be read.
    """
    files = encoder_files(spec)
    sidecar = read_sidecar(files[0]) if files else None
    if sidecar is None or sidecar.card is None:
        return None
    return EncoderCard.from_graph(sidecar.card, file=str(sidecar_path(files[0])))


def check_card(card: EncoderCard, model: LoadedModel, *, spec: CaptionerSpec) -> None:
    """Raise GraphError unless the encoder of `spec` was exported from this model's picture half.

    Only the halves that the model's files hold are compared: beside an exported encoder, CLIP may be missing.
    """
    made, wanted = card.output_shape, (model.decoder_config.num_queries, model.decoder_config.dim)
    if made != wanted:
        raise GraphError(
            f"The encoder `{spec.encoder}` makes {made[0]} visual queries of width {made[1]}, and the model "
            f"{model.name} reads {wanted[0]} of width {wanted[1]}",
            hint=_EXPORT_AGAIN,
        )
    # 8-bit weights differ in some signs: compare with the weights they were made from.
    own_halves = fingerprint(model.vision_state) if model.origin is None else model.origin.fingerprint
    for half, own in own_halves.items():
        if not is_same(card.fingerprint.get(half), own):
            raise GraphError(
                f"The encoder `{spec.encoder}` was exported from {card.name}, and its {_HALVES[half]} are not those "
                f"of the model {model.name}",
                hint=_EXPORT_AGAIN,
            )
    if card.vision.channel_order != model.vision_config.channel_order:
        raise GraphError(
            f"The encoder `{spec.encoder}` reads colours in the order {card.vision.channel_order}, and the model "
            f"{model.name} was trained on {model.vision_config.channel_order}",
            hint="pass the same --channel-order here and to `llama-adapter export`",
        )
    if card.vision != model.vision_config:
        raise GraphError(
            f"The encoder `{spec.encoder}` was exported with {_differences(card.vision, model.vision_config)} for the "
            f"model {model.name}",
            hint=_EXPORT_AGAIN,
        )


def _differences(exported: VisionConfig, wanted: VisionConfig) -> str:
    """Such as: query num_heads 2, where 4 is wanted."""
    theirs, ours = exported.to_dict(), wanted.to_dict()
    return ", ".join(
        f"{half} {name} {value}, where {ours[half][name]} is wanted"
        for half in ("clip", "query")
        for name, value in theirs[half].items()
        if value != ours[half][name]
    )


def check_sizes(encoder: VisionBackend, model: LoadedModel, *, spec: CaptionerSpec) -> None:
    """Raise GraphError where an encoder takes pictures of another size; it may have no card."""
    if encoder.image_size != model.vision_config.clip.image_size:
        raise GraphError(
            f"The encoder `{spec.encoder}` takes pictures of {encoder.image_size} pixels, and the model {model.name} "
            f"of {model.vision_config.clip.image_size}",
            hint=_EXPORT_AGAIN,
        )
