"""Looks at an exported encoder before it is used: whether it opens, is whole, and belongs to the model beside it.

The model itself is looked at in `model.py`. Nothing is imported here until the packages were found to be right.
"""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_adapter.app.doctor.model import Finding, Report, diagnose, ok
from llama_adapter.app.models.spec import CaptionerSpec

if TYPE_CHECKING:
    from llama_adapter.app.models.checkpoints import LoadedModel, ModelSources
    from llama_adapter.runtime.graphs.card import EncoderCard
    from llama_adapter.vision.backends.open import ExportedBackend

_WHAT = "encoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderQuestion:
    """Which exported encoder is asked about, and where an OM may be loaded for it."""

    spec: CaptionerSpec
    beside: int | None  # the decoder's device, if that kind runs OMs; None: an OM's files are looked at, no more

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
    """Check a model as `diagnose` does, and the exported encoder beside it; never raises for what is wrong."""
    with ExitStack() as stack:
        findings, parts, backend = _look_at_files(question, stack)
        card = next((part.card for part in parts if part.card is not None), None)
        findings = [*diagnose(target, encoder=card, precision=question.spec.precision), *findings]
        if parts:
            findings += _compare(parts, backend, target)
    return findings


_Looked = tuple[list[Finding], list[_Part], "ExportedBackend | None"]


def _look_at_files(question: EncoderQuestion, stack: ExitStack) -> _Looked:
    """The findings, the files that are what they say, and the encoder where it was opened."""
    from llama_adapter.app.models.encoders import check_encoder_exists

    report = Report()
    report.attempt(_WHAT, lambda: check_encoder_exists(question.spec))
    if faults := report.take():
        return faults, [], None
    if question.spec.vision_kind == "onnx":
        return _look_at_onnx(question.spec, stack)
    findings, parts = _look_at_oms(question.spec)
    if any(finding.level == "error" for finding in findings):
        return findings, parts, None
    if question.device_id is None:
        sentence = "The OM was not loaded, since no device that runs it is named"
        return (
            [*findings, Finding(level="not tried", what=_WHAT, sentence=sentence, hint="name it as --device")],
            parts,
            None,
        )
    opened, backend = _open(question.spec, stack, device_id=question.device_id)
    return [*findings, *opened], parts, backend


def _look_at_onnx(spec: CaptionerSpec, stack: ExitStack) -> _Looked:
    findings, backend = _open(spec, stack)
    return findings, [] if backend is None else [_Part(spec=spec, card=backend.card)], backend


def _open(
    spec: CaptionerSpec, stack: ExitStack, *, device_id: int = 0
) -> "tuple[list[Finding], ExportedBackend | None]":
    from llama_adapter.vision.backends.open import EncoderSpec, open_encoder

    assert spec.encoder is not None
    kind, path = ("onnx", spec.encoder) if spec.vision_kind == "onnx" else ("om", spec.encoder)
    # A device may take the process down with it.
    wanted = EncoderSpec(kind=kind, path=path, device_id=device_id, own_process=kind == "om")  # type: ignore[arg-type]
    report = Report()
    backend = report.attempt(_WHAT, lambda: stack.enter_context(closing(open_encoder(wanted))))
    if backend is None:
        return report.take(), None
    sizes = "any" if backend.batch_sizes is None else _either(backend.batch_sizes)
    sentence = f"{backend.name} opens `{path}`: pictures of {backend.image_size} pixels, batch size {sizes}"
    return [ok(_WHAT, sentence)], backend


def _look_at_oms(spec: CaptionerSpec) -> tuple[list[Finding], list[_Part]]:
    """By their files alone: what InferSession demands, side-car, digest."""
    assert spec.encoder is not None
    place = Path(spec.encoder)
    files = sorted(place.glob("*.om")) if place.is_dir() else [place]
    if not files:
        hint = "`llama-adapter export om --out FOLDER/NAME` makes some"
        sentence = f"The folder `{place}` holds no .om file"
        return [Finding(level="error", what=_WHAT, sentence=sentence, hint=hint)], []
    findings, parts = [], []
    for file in files:
        faults, part = _look_at_om(dataclasses.replace(spec, encoder=str(file)), file)
        findings += faults
        parts += [] if part is None else [part]
    return findings, parts


def _look_at_om(spec: CaptionerSpec, file: Path) -> tuple[list[Finding], _Part | None]:
    from llama_adapter.runtime.graphs.sidecar import check_om_file, read_valid_sidecar, sidecar_path

    report = Report()
    report.attempt(_WHAT, lambda: check_om_file(file))
    if faults := report.take():
        return faults, None  # it may not even be readable
    sidecar = report.attempt(_WHAT, lambda: read_valid_sidecar(file))
    if faults := report.take():
        return faults, None
    if sidecar is None:
        sentence = f"`{file}` has no side-car `{sidecar_path(file).name}` beside it"
        hint = "copy it too, it is written with the OM; one with gears does not run without"
        return [Finding(level="warning", what=_WHAT, sentence=sentence, hint=hint)], _Part(spec=spec, card=None)
    made = f"for {sidecar.soc_version}, batch size {_either(sidecar.batch_sizes)}"
    sentence = f"`{file}` is whole, by the digest in its side-car: {sidecar.input.dtype} {made}"
    return [ok(_WHAT, sentence)], _Part(spec=spec, card=sidecar.card)


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _compare(
    parts: Sequence[_Part], backend: "ExportedBackend | None", target: "ModelSources | str | os.PathLike[str]"
) -> list[Finding]:
    """Whether the files are those of the model."""
    report = Report()
    model = report.attempt(_WHAT, lambda: _load(target, parts[0]))
    if model is None:  # why was told as a fault of the model
        sentence = "The model cannot be read, so nobody can tell whether the encoder is its own"
        return [Finding(level="not tried", what=_WHAT, sentence=sentence)]
    from llama_adapter.app.models.encoders import check_sizes

    findings = []
    for part in parts:
        findings += _compare_part(part, model)
    if backend is not None:
        report.attempt(_WHAT, lambda: check_sizes(backend, model, spec=parts[0].spec))
    return [*findings, *report.take()]


def _compare_part(part: _Part, model: "LoadedModel") -> list[Finding]:
    from llama_adapter.app.models.encoders import check_card

    card, name = part.card, part.spec.encoder
    if card is None:
        sentence = f"`{name}` does not say of which model it is, so that cannot be checked"
        return [Finding(level="warning", what=_WHAT, sentence=sentence)]
    report = Report()
    report.attempt(_WHAT, lambda: check_card(card, model, spec=part.spec))
    if faults := report.take():
        return faults
    has_clip = any(key.startswith("clip.") for key in model.vision_state)
    compared = "CLIP and visual blocks" if has_clip else "the visual blocks (there is no CLIP to compare)"
    return [ok(_WHAT, f"`{name}` is this model's own, by {compared}")]


def _load(target: "ModelSources | str | os.PathLike[str]", part: _Part) -> "LoadedModel":
    """The model without its decoder's tensors, which may be larger than the memory."""
    import torch

    from llama_adapter.app.models.bundle import load_bundle
    from llama_adapter.app.models.checkpoints import stream_sources

    order = part.spec.channel_order
    if isinstance(target, str | os.PathLike):
        return load_bundle(target, channel_order=None if order == "auto" else order)
    return stream_sources(target, dtype=torch.float16, encoder=part.card)[0]
