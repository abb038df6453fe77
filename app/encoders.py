"""Exported encoders beside a model: their cards, and whether what they hold is the model's own picture half."""

from pathlib import Path

from app.checkpoints import LoadedModel
from app.spec import CaptionerSpec
from vision.backends.base import VisionBackend
from vision.backends.open import EncoderSpec
from vision.card import EncoderCard, fingerprint
from vision.errors import EncoderError
from vision.sidecar import read_sidecar

_EXPORT_AGAIN = "export this model's encoder with `llama-adapter export onnx`, and for an OM go on with `export om`"
_HALVES = {"clip": "CLIP", "query": "visual blocks"}


def encoder_spec(spec: CaptionerSpec, *, device_id: int) -> EncoderSpec:
    """The exported encoder that `spec` names, for the accelerator of that number."""
    assert spec.encoder is not None, "the spec checks that there is one"
    return EncoderSpec(
        kind="onnx" if spec.vision_kind == "onnx" else "om",
        path=spec.encoder,
        device_id=device_id,
        own_process=spec.encoder_process,
    )


def om_card(spec: CaptionerSpec) -> EncoderCard | None:
    """The card beside an OM file, or beside the first one of a folder, without opening the OM itself.

    Raises EncoderError for a side-car that cannot be read.
    """
    assert spec.encoder is not None
    place = Path(spec.encoder)
    files = sorted(place.glob("*.om")) if place.is_dir() else [place]
    sidecar = read_sidecar(files[0]) if files else None
    return None if sidecar is None else sidecar.card


def check_card(card: EncoderCard, model: LoadedModel, *, spec: CaptionerSpec) -> None:
    """Raise EncoderError unless the encoder of `spec` was exported from this model's picture half.

    Only the halves that the model's files hold are compared: beside an exported encoder, CLIP may be missing.
    """
    made, wanted = card.output_shape, (model.decoder_config.num_queries, model.decoder_config.dim)
    if made != wanted:
        raise EncoderError(
            f"The encoder `{spec.encoder}` makes {made[0]} visual queries of width {made[1]}, and the model "
            f"{model.name} reads {wanted[0]} of width {wanted[1]}",
            hint=_EXPORT_AGAIN,
        )
    for half, digest in fingerprint(model.vision_state).items():
        if card.fingerprint.get(half) != digest:
            raise EncoderError(
                f"The encoder `{spec.encoder}` was exported from {card.name}, and its {_HALVES[half]} are not those "
                f"of the model {model.name}",
                hint=_EXPORT_AGAIN,
            )
    trained, exported = model.vision_config.channel_order, card.vision.channel_order
    if trained != exported:
        raise EncoderError(
            f"The encoder `{spec.encoder}` reads colours in the order {exported}, and the model {model.name} was "
            f"trained on {trained}",
            hint="pass the same --channel-order here and to `llama-adapter export`",
        )


def check_sizes(encoder: VisionBackend, model: LoadedModel, *, spec: CaptionerSpec) -> None:
    """Raise EncoderError where an encoder, which may have come without a card, takes pictures of another size."""
    if encoder.image_size != model.vision_config.clip.image_size:
        raise EncoderError(
            f"The encoder `{spec.encoder}` takes pictures of {encoder.image_size} pixels, and the model {model.name} "
            f"of {model.vision_config.clip.image_size}",
            hint=_EXPORT_AGAIN,
        )
