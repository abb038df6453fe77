"""The encoder that a spec names in place of the model's own: opened, and checked by its card or its outputs."""

import dataclasses
import mmap
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from llama_adapter.app.models.checkpoints import LoadedModel, read_encoder
from llama_adapter.app.models.exported import (
    ExportedModel,
    check_fingerprint,
    encoder_files,
    encoder_graph,
    encoder_identity,
    half_name,
    output_name,
)
from llama_adapter.app.models.memory_fit import place_encoder
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources, tokens_error
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.app.pictures.prefixes.file import Encoding, check_keys_values, read_first_file
from llama_adapter.runtime.devices import EAGER, Backend, open_backend
from llama_adapter.runtime.errors import CheckpointError, GraphError
from llama_adapter.runtime.graphs.card import is_same
from llama_adapter.runtime.graphs.open_session import GraphSpec
from llama_adapter.runtime.graphs.sidecar import read_sidecar, sidecar_path
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.vision.backends.base import EncodedBefore, VisionBackend
from llama_adapter.vision.backends.exported import ExportedEncoder, open_encoder
from llama_adapter.vision.card import GRAPH_NAME, EncoderCard
from llama_adapter.vision.config import ChannelOrder, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.pixels import PIXEL_STD

_EXPORT_AGAIN = "export this model's encoder with `llama-adapter export onnx`, and for an OM go on with `export om`"
_ENCODE_AGAIN = "name the model that encoded them, or encode the pictures again with this one by `llama-adapter encode`"
# The export script of the ModelZoo's demo uses another standard deviation for green than CLIP.
_MODEL_ZOO_STD: Final = (PIXEL_STD[0], 0.24130258, PIXEL_STD[2])
# Relative differences of visual queries. Rounding to float16 causes less than the first. Above the second, the encoders
# have little in common.
_SAME, _RELATED = 0.03, 0.3


def encoder_spec(spec: CaptionerSpec, *, backend: Backend, mode: str) -> GraphSpec:
    """The exported encoder that `spec` names, for use with a decoder on `backend`."""
    shares_device = backend.capabilities.runs_om and spec.vision_kind == "om"
    # An OM session changes how streams that are created later compute. Graph modes create their streams late, so the OM
    # then runs in its own process.
    return encoder_graph(spec, own_process=shares_device and mode != EAGER)


class GivenEncoder:
    """What a spec names in place of the model's own encoder: an exported encoder, or prefix files.

    `check` is called before weights are placed, and `open` after that.
    """

    def __init__(self, spec: CaptionerSpec, *, backend: Backend, mode: str) -> None:
        """For a decoder on `backend`. Raises GraphError and PrefixFileError.

        An OM is not opened yet: the decoder's device must be initialised before the OM creates its own context.
        """
        self.spec = spec  # of prefix files, with the way in which their pictures were read
        self.card: EncoderCard | None = None  # None if the encoder's files have none
        self._encoding: Encoding | None = None  # of prefix files
        self._exported: ExportedEncoder | None = None
        if spec.vision_kind == "prefixes":
            self._encoding = read_first_file(str(spec.encoder)).encoding
            self.card = self._encoding.card
            self.spec = dataclasses.replace(spec, **self._encoding.reading_of_pictures)
            return
        self._graph = encoder_spec(spec, backend=backend, mode=mode)
        if spec.vision_kind == "om":
            self.card = om_card(spec)
        else:
            self._exported = open_encoder(self._graph)
            self.card = self._exported.card

    def check(self, model: LoadedModel) -> None:
        """Raise GraphError, PrefixFileError or UsageError if it is of another model, as far as files say."""
        encoding, spec = self._encoding, self.spec
        if encoding is not None and model.picture_format is not None:
            raise tokens_error(model.name)
        if self.card is not None and (encoding is None or encoding.keeps == "queries"):
            check_card(self.card, model, spec=spec)
        if encoding is None:
            return
        if encoding.keeps == "keys_values" and encoding.digest != model.digest:
            raise GraphError(
                f"The prefixes `{spec.encoder}` hold keys and values of the model {encoding.name} "
                f"({encoding.digest[:12]}), and this is {model.name} ({model.digest[:12]})",
                hint="load the bundle that encoded them, or encode again without --keys-values",
            )
        check_keys_values(str(spec.encoder), model.decoder_config)

    def open(self, model: LoadedModel) -> tuple[VisionBackend, str | None, str]:
        """The backend, its identity in records (None if it is this model's own encoder), and a note for the user.

        Raises GraphError for an encoder that does not fit `model`.
        """
        if (encoding := self._encoding) is not None:
            own, made = (dtype_name(model.dtype), model.precision), (encoding.dtype, encoding.precision)
            return EncodedBefore(encoding.vision), encoding.encoder or (None if made == own else " ".join(made)), ""
        encoder = self._exported = self._exported or open_encoder(self._graph)
        check_sizes(encoder, model, spec=self.spec)
        vision = model.vision_config
        # Another size: CLIP's weights are missing.
        if self.card is None and vision.clip.image_size == encoder.image_size:
            encoder.vision = vision
        note = examine(encoder, model, spec=self.spec).sentence if self.card is None else ""
        return encoder, encoder_identity(self.spec, channel_order=encoder.channel_order), note

    def close(self) -> None:
        """Close the encoder, if it was opened."""
        if self._exported is not None:
            self._exported.close()


def om_card(spec: CaptionerSpec) -> EncoderCard | None:
    """The card in the side-car of an OM file, or of the first OM in a folder. The OM itself is not opened.

    Raises GraphError for a side-car that cannot be read.
    """
    files = encoder_files(spec)
    sidecar = read_sidecar(files[0]) if files else None
    if sidecar is None or sidecar.card is None:
        return None
    return EncoderCard.from_graph(sidecar.card, file=str(sidecar_path(files[0])))


def check_card(card: EncoderCard, model: LoadedModel, *, spec: CaptionerSpec) -> None:
    """Raise GraphError unless the encoder of `spec` was exported from this model's encoder.

    Only parts that the model's files contain are compared: with an exported encoder, CLIP may be missing. `spec` may
    also name prefix files, which have the card of the encoder that encoded them.
    """
    it = f"`{spec.encoder}` was made from {card.name}"
    are_prefixes = spec.vision_kind == "prefixes"
    hint, maker = (_ENCODE_AGAIN, "encode") if are_prefixes else (_EXPORT_AGAIN, "export")
    made, wanted = card.output_shape, _read_sizes(model)
    if made != wanted:
        raise _other_queries(spec, model, made=made, wanted=wanted)
    # Quantised weights differ in some signs, so the weights from which they were made are compared.
    for half, own in model.source.fingerprint.items():
        if not is_same(card.fingerprint.get(half), own):
            its = half_name(half, model.picture_format)
            raise GraphError(  # whole, because guides quote it
                f"`{spec.encoder}` was made from {card.name}, and its {its} are not those of the model {model.name}",
                hint=hint,
            )
    if card.vision.channel_order != model.vision_config.channel_order:
        raise GraphError(
            f"{it}, which reads colours in the order {card.vision.channel_order}, and the model {model.name} was "
            f"trained on {model.vision_config.channel_order}",
            hint=f"pass the same --channel-order here and to `llama-adapter {maker}`",
        )
    if card.vision != model.vision_config:
        difference = _differences(card.vision, model.vision_config)
        raise GraphError(f"{it} with {difference} for the model {model.name}", hint=hint)


def _read_sizes(model: LoadedModel) -> tuple[int, int]:
    """(Q, D) of what the model reads of a picture, or of one square of it."""
    config, pictures = model.decoder_config, model.picture_format
    return config.num_queries if pictures is None else pictures.tokens_each, config.dim


def _other_queries(
    spec: CaptionerSpec, model: LoadedModel, *, made: tuple[int, ...], wanted: tuple[int, ...]
) -> GraphError:
    them, make, hint = (
        ("prefixes", "hold", _ENCODE_AGAIN) if spec.vision_kind == "prefixes" else ("encoder", "makes", _EXPORT_AGAIN)
    )
    return GraphError(
        f"The {them} `{spec.encoder}` {make} {made[0]} {output_name(model.picture_format)} of width {made[1]}, and "
        f"the model {model.name} reads {wanted[0]} of width {wanted[1]}",
        hint=hint,
    )


def _differences(exported: VisionConfig, wanted: VisionConfig) -> str:
    """The differences in words, such as `query num_heads 2, where 4 is wanted`."""
    theirs, ours = dataclasses.asdict(exported), dataclasses.asdict(wanted)
    return ", ".join(
        f"{half} {name} {value}, where {ours[half][name]} is wanted"
        for half in ("clip", "query")
        for name, value in theirs[half].items()
        if value != ours[half][name]
    )


def check_sizes(encoder: ExportedEncoder, model: LoadedModel, *, spec: CaptionerSpec) -> None:
    """Raise GraphError if an encoder, with or without a card, has other input or output sizes than the model."""
    made, wanted = encoder.query_shape, _read_sizes(model)
    if any(have not in (-1, want) for have, want in zip(made, wanted, strict=True)):
        raise _other_queries(spec, model, made=made, wanted=wanted)
    # Without CLIP's weights, the model's picture size is unknown.
    if has_clip(model) and encoder.image_size != model.vision_config.clip.image_size:
        raise GraphError(
            f"The encoder `{spec.encoder}` takes pictures of {encoder.image_size} pixels, and the model {model.name} "
            f"of {model.vision_config.clip.image_size}",
            hint=_EXPORT_AGAIN,
        )


def has_clip(model: LoadedModel) -> bool:
    """Whether the model has CLIP's weights. With an exported encoder, they may be missing."""
    return any(name.startswith("clip.") for name in model.vision_state)


class Examined(NamedTuple):
    """The finding on an encoder without a card: a sentence for the user, and whether it surely belongs to the model."""

    sentence: str
    is_sure: bool


def examine(encoder: ExportedEncoder, model: LoadedModel, *, spec: CaptionerSpec) -> Examined:
    """Find out what an encoder without a card computes, and set the channel order of its input.

    An OM that the user made with ATC has no card, and an ONNX file of another program has none. If CLIP is available,
    the encoder's visual query of a test picture is compared with torch's, in both channel orders. Without CLIP, the
    graph takes RGB if its node names show that this program exported it. Otherwise it takes the channel order of the
    model's training, as with the export script of the ModelZoo's demo. Raises GraphError for an encoder that has little
    in common with the model.
    """
    start = f"`{spec.encoder}` does not name its model"
    is_ours = _is_ours(encoder_files(spec)[0])
    encoder.channel_order = "rgb" if is_ours else model.vision_config.channel_order
    missing, unchecked, made, parts = "CLIP's weights (--clip)", "adapter", "visual query", "adapter or CLIP"
    if model.picture_format is not None:
        missing, unchecked, made, parts = "the model's full weights", "weights", "encoding", "tower or connector"
    reference = _reference(model, spec)
    if reference is None:
        given = encoder.channel_order.upper()
        unchecked += "" if is_ours else f", its normalisation and its order of colours ({given})"
        return Examined(f"{start}. Without {missing}, its {unchecked} cannot be checked", False)
    difference, encoder.channel_order, has_typo = min(_compare(encoder, reference))
    compared = f"Its {made} of a test picture differs from torch's by {difference:.1%} of its size"
    if not difference <= _RELATED:  # also for NaN
        raise GraphError(
            f"The encoder `{spec.encoder}` is not that of the model {model.name}. {compared}",
            hint=f"it has another {parts}, normalises otherwise, or overflows in float16; {_EXPORT_AGAIN}",
        )
    told = [f"{start}. {compared}" + ", more than rounding explains" * (difference > _SAME)]
    if has_typo:
        told.append(
            f"It normalises green with the standard deviation {_MODEL_ZOO_STD[1]} of the ModelZoo's pth2onnx.py, where "
            f"CLIP has {PIXEL_STD[1]}: export it again with scripts/pth2onnx.py"
        )
    if encoder.channel_order != "rgb":
        told.append("It takes colours in the order B, G, R")
    return Examined(". ".join(told), difference <= _SAME and not has_typo)


def _is_ours(file: Path) -> bool:
    """Whether a graph has the node names that this program's export gives."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(GRAPH_NAME.encode()) >= 0


def _reference(model: LoadedModel, spec: CaptionerSpec) -> PictureEncoder | None:
    """The model's picture encoder in float32; None if its weights are not available."""
    config, state = model.vision_config, model.vision_state
    if model.precision != FLOAT or not has_clip(model):
        if spec.adapter is None:
            return None
        try:
            shared: Any = {name: getattr(spec, name) for name in ("adapter", "clip", "visual_heads")}
            _, config, state = read_encoder(EncoderSources(**shared, channel_order=config.channel_order))
        except CheckpointError:
            return None
    return encoder_from_state(config, {name: tensor.float() for name, tensor in state.items()})


def _compare(encoder: ExportedEncoder, reference: PictureEncoder) -> list[tuple[float, ChannelOrder, bool]]:
    """Relative differences of visual queries, each with the channel order and whether it is for the ModelZoo's std."""
    side = encoder.image_size
    # A mosaic of random colours, in which all channels differ.
    tiles = np.arange(side) * 7 // side
    pixels_BHWC = np.random.default_rng(0).integers(0, 256, (1, 7, 7, 3), dtype=np.uint8)[:, tiles][:, :, tiles]
    queries, own = [], reference.config.clip.std
    with torch.inference_mode():
        for std in (own, _MODEL_ZOO_STD) if own == PIXEL_STD else (own,):
            reference.std = torch.tensor(std, dtype=torch.float32).view(3, 1, 1)
            queries.append(reference(torch.from_numpy(pixels_BHWC)))
    found: list[tuple[float, ChannelOrder, bool]] = []
    orders: tuple[ChannelOrder, ...] = ("rgb", "bgr")
    for order in orders:
        encoder.channel_order = order
        made = torch.from_numpy(encoder.encode(pixels_BHWC)).float()
        for has_typo, wanted in enumerate(queries):
            difference = float((made - wanted).norm() / wanted.norm())
            found.append((difference, order, bool(has_typo)))
    return found


def open_torch_encoder(spec: CaptionerSpec, exported: ExportedModel) -> tuple[VisionBackend, Precision]:
    """The encoder of the model in `spec` in torch, for an exported decoder of the same model; and its precision.

    Raises CheckpointError without CLIP, GraphError for another model.
    """
    with torch.device("cpu"):  # a program may have made another device torch's default
        model, _ = stream_model(spec, dtype=torch.float32)
        if not has_clip(model):
            raise CheckpointError(f"`{model.name}` has no CLIP", hint="name its file as --clip")
        check_fingerprint(model.source.fingerprint, exported, what=f"The model `{model.name}`", name=model.name)
        backend = open_backend("cpu")
        options: Any = {"num_rows": 1, "operators": spec.operators, "backend": backend}
        return place_encoder(model.vision_config, model.vision_state, **options), model.precision
