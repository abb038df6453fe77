"""Checks an exported encoder before it is used: whether it opens, is whole, and belongs to the model beside it.

Other packages are imported only where a check needs them.
"""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llama_adapter.app.doctor.model import Finding, Report, diagnose, error, not_tried, ok, warning
from llama_adapter.app.models.spec import CaptionerSpec

if TYPE_CHECKING:
    from llama_adapter.app.models.checkpoints import LoadedModel, ModelSources
    from llama_adapter.vision.backends.exported import ExportedEncoder
    from llama_adapter.vision.card import EncoderCard

_WHAT = "encoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderQuestion:
    """Which exported encoder to check, and where an OM may be loaded for it."""

    spec: CaptionerSpec
    beside: int | None  # the number of the decoder's device, if it runs OMs; None: only an OM's files are checked

    @property
    def device_id(self) -> int | None:
        """The device on which an OM is to be loaded, if on any."""
        return self.beside if self.beside is None or self.spec.encoder_device is None else self.spec.encoder_device


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One file of an encoder: what it says of itself, and the spec that names it alone."""

    spec: CaptionerSpec
    card: "EncoderCard | None"


def diagnose_with_encoder(target: "ModelSources | str | os.PathLike[str]", question: EncoderQuestion) -> list[Finding]:
    """Check a model as `diagnose` does, and the exported encoder beside it. Faults are returned and never raised."""
    report = Report()
    with ExitStack() as stack:
        parts, encoder = _check_files(question, report, stack)
        of_files = report.take()
        card = next((part.card for part in parts if part.card is not None), None)
        of_model = diagnose(target, encoder=card, precision=question.spec.precision)
        if parts:
            _compare(parts, encoder, target, report)
        return [*of_model, *of_files, *report.take()]


def _check_files(
    question: EncoderQuestion, report: Report, stack: ExitStack
) -> "tuple[list[_Part], ExportedEncoder | None]":
    """The files that are what they say, and the encoder where it was opened."""
    from llama_adapter.app.models.encoders import check_encoder_exists, encoder_files

    spec = question.spec
    report.attempt(_WHAT, lambda: check_encoder_exists(spec))
    if report.has_errors:
        return [], None
    if spec.vision_kind == "onnx":
        encoder = _open(spec, report, stack, device_id=0)
        return [] if encoder is None else [_Part(spec=spec, card=encoder.card)], encoder
    files = encoder_files(spec)
    if not files:
        hint = "`llama-adapter export om --out FOLDER/NAME` makes some"
        report.add(error(_WHAT, f"The folder `{spec.encoder}` holds no .om file", hint=hint))
    parts = [part for file in files if (part := _check_om(spec, file, report)) is not None]
    if report.has_errors:
        return parts, None
    if question.device_id is None:
        sentence = "The OM was not loaded, since no device that runs it is named"
        report.add(not_tried(_WHAT, sentence, hint="name it as --device"))
        return parts, None
    return parts, _open(spec, report, stack, device_id=question.device_id)


def _open(spec: CaptionerSpec, report: Report, stack: ExitStack, *, device_id: int) -> "ExportedEncoder | None":
    from llama_adapter.runtime.graphs.open_session import GraphSpec
    from llama_adapter.vision.backends.exported import open_encoder

    assert spec.encoder is not None
    is_om = spec.vision_kind == "om"
    # A device may take the process down with it.
    graph = GraphSpec(kind="om" if is_om else "onnx", path=spec.encoder, device_id=device_id, own_process=is_om)
    encoder = report.attempt(_WHAT, lambda: stack.enter_context(closing(open_encoder(graph))))
    if encoder is not None:
        sizes = "any" if encoder.batch_sizes is None else _either(encoder.batch_sizes)
        sentence = f"{encoder.name} opens `{graph.path}`: pictures of {encoder.image_size} pixels, batch size {sizes}"
        report.add(ok(_WHAT, sentence))
    return encoder


def _check_om(spec: CaptionerSpec, file: Path, report: Report) -> _Part | None:
    """By its files alone: what InferSession demands, side-car, digest. None where one is wrong."""
    from llama_adapter.runtime.graphs.sidecar import check_om_file, read_valid_sidecar, sidecar_path
    from llama_adapter.vision.card import EncoderCard

    spec = dataclasses.replace(spec, encoder=str(file))

    def check() -> _Part:
        check_om_file(file)
        sidecar = read_valid_sidecar(file)
        if sidecar is None:
            sentence = f"`{file}` has no side-car `{sidecar_path(file).name}` beside it"
            hint = "copy it too, it is written with the OM; one with gears does not run without"
            report.add(warning(_WHAT, sentence, hint=hint))
            return _Part(spec=spec, card=None)
        card = None if sidecar.card is None else EncoderCard.from_graph(sidecar.card, file=str(file))
        made = f"for {sidecar.soc_version}, batch size {_either(sidecar.batch_sizes)}"
        report.add(ok(_WHAT, f"`{file}` is whole, by the digest in its side-car: {sidecar.input.dtype} {made}"))
        return _Part(spec=spec, card=card)

    return report.attempt(_WHAT, check)


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _compare(
    parts: Sequence[_Part],
    encoder: "ExportedEncoder | None",
    target: "ModelSources | str | os.PathLike[str]",
    report: Report,
) -> None:
    """Whether the files are those of the model."""
    from llama_adapter.app.models.encoders import check_sizes

    model = Report().attempt(_WHAT, lambda: _load(target, parts[0]))
    if model is None:  # `diagnose` says why
        report.add(not_tried(_WHAT, "The model cannot be read, so it is not known whether the encoder is its own"))
        return
    has_clip = any(key.startswith("clip.") for key in model.vision_state)
    compared = "CLIP and visual blocks" if has_clip else "the visual blocks (there is no CLIP to compare)"
    for part in parts:
        name, card = part.spec.encoder, part.card
        if card is None:
            report.add(warning(_WHAT, f"`{name}` does not say of which model it is, so that cannot be checked"))
        elif report.attempt(_WHAT, partial(_is_own, card, model, part.spec)):
            report.add(ok(_WHAT, f"`{name}` is this model's own, by {compared}"))
    if encoder is not None:
        report.attempt(_WHAT, lambda: check_sizes(encoder, model, spec=parts[0].spec))


def _is_own(card: "EncoderCard", model: "LoadedModel", spec: CaptionerSpec) -> bool:
    from llama_adapter.app.models.encoders import check_card

    check_card(card, model, spec=spec)
    return True


def _load(target: "ModelSources | str | os.PathLike[str]", part: _Part) -> "LoadedModel":
    """The model without its decoder's tensors, which may be larger than the memory."""
    import torch

    from llama_adapter.app.models.bundle import load_bundle
    from llama_adapter.app.models.checkpoints import stream_sources

    order = part.spec.channel_order
    if isinstance(target, str | os.PathLike):
        return load_bundle(target, channel_order=None if order == "auto" else order)
    return stream_sources(target, dtype=torch.float16, encoder=part.card)[0]
