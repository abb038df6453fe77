"""Checks an exported encoder before use: whether it opens, is undamaged, and belongs to the model it is used with."""

import dataclasses
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from llama_adapter.app.command_line.doctor.findings import Finding, Report
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.early import check_encoder_exists
from llama_adapter.app.models.encoders import check_card, check_sizes, examine, has_clip
from llama_adapter.app.models.exported import encoder_files, encoder_graph
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.runtime.device_names import split_device
from llama_adapter.runtime.devices import accelerator_kind
from llama_adapter.runtime.graphs.sidecar import check_om_file, read_valid_sidecar, sidecar_path
from llama_adapter.vision.backends.exported import ExportedEncoder, open_encoder
from llama_adapter.vision.card import EncoderCard

_WHAT = "encoder"


class _Part(NamedTuple):
    """One file of an encoder: the spec with only this file, and its card."""

    spec: CaptionerSpec
    card: EncoderCard | None


def diagnose_with_encoder(spec: CaptionerSpec) -> list[Finding]:
    """Check the model of `spec` as `diagnose` does, and its exported encoder.

    An OM is loaded only if `spec.device` is a device that runs it. Faults are returned as findings, never raised.
    """
    of_files, of_both = Report(), Report()
    with ExitStack() as stack:
        parts, encoder = _check_files(of_files, spec, stack)
        card = next((part.card for part in parts if part.card is not None), None)
        of_model = diagnose(spec, exported=True, encoder=card)
        if parts:
            _compare(of_both, parts, encoder)
    return [*of_model, *of_files.findings, *of_both.findings]


def runs_om(spec: CaptionerSpec) -> bool:
    """Whether the decoder's device can run an OM."""
    return ((accelerator_kind() or "cpu") if spec.device == AUTO else split_device(spec.device)[0]) == "npu"


def _check_files(report: Report, spec: CaptionerSpec, stack: ExitStack) -> tuple[list[_Part], ExportedEncoder | None]:
    """The intact files, and the encoder if it was opened."""
    if not report.passes(_WHAT, lambda: check_encoder_exists(spec)):
        return [], None
    if spec.vision_kind == "onnx":
        encoder = _open(report, spec, stack)
        return [] if encoder is None else [_Part(spec, encoder.card)], encoder
    files = encoder_files(spec)
    if not files:
        hint = "`llama-adapter export om --out FOLDER/NAME` makes some"
        report.add("error", _WHAT, f"The folder `{spec.encoder}` holds no .om file", hint)
    parts = [part for file in files if (part := _check_om(report, spec, file)) is not None]
    if report.has_errors:
        return parts, None
    if not runs_om(spec):
        sentence = "The OM was not loaded, because no device that runs it is named"
        report.add("not tried", _WHAT, sentence, "name it as --device")
        return parts, None
    return parts, _open(report, spec, stack)


def _open(report: Report, spec: CaptionerSpec, stack: ExitStack) -> ExportedEncoder | None:
    # An OM runs in its own process, because a device fault may end the process.
    graph = encoder_graph(spec, own_process=spec.vision_kind == "om")
    encoder = report.attempt(_WHAT, lambda: stack.enter_context(closing(open_encoder(graph))))
    if encoder is not None:
        sizes = " or ".join(map(str, encoder.batch_sizes or ["any"]))
        sentence = f"{encoder.name} opens `{graph.path}`: pictures of {encoder.image_size} pixels, batch size {sizes}"
        report.add("ok", _WHAT, sentence)
    return encoder


def _check_om(report: Report, spec: CaptionerSpec, file: Path) -> _Part | None:
    """Check InferSession's rules, the side-car and the digest, without loading the OM. Returns None after an error."""
    spec = dataclasses.replace(spec, encoder=str(file))

    def check() -> _Part:
        check_om_file(file)
        sidecar = read_valid_sidecar(file)
        if sidecar is None:
            sentence = f"`{file}` has no side-car `{sidecar_path(file).name}` beside it"
            hint = "copy it too, it is written with the OM; one with gears does not run without"
            report.add("warning", _WHAT, sentence, hint)
            return _Part(spec, None)
        card = None if sidecar.card is None else EncoderCard.from_graph(sidecar.card, file=str(file))
        made = f"for {sidecar.soc_version}, batch size {' or '.join(map(str, sidecar.batch_sizes))}"
        sentence = f"`{file}` is whole, by the digest in its side-car: {sidecar.input.dtype} {made}"
        report.add("ok", _WHAT, sentence)
        return _Part(spec, card)

    return report.attempt(_WHAT, check)


def _compare(report: Report, parts: list[_Part], encoder: ExportedEncoder | None) -> None:
    """Check that the encoder's files belong to the model."""
    model = Report().attempt(_WHAT, lambda: _load(parts[0]))
    if model is None:  # the findings of `diagnose` have the reason
        sentence = "The model cannot be read, so it is not known whether the encoder is its own"
        report.add("not tried", _WHAT, sentence)
        return
    if encoder is not None and not report.passes(_WHAT, lambda: check_sizes(encoder, model, spec=parts[0].spec)):
        return
    compared = "CLIP and visual blocks" if has_clip(model) else "the visual blocks (there is no CLIP to compare)"
    if model.picture_format is not None:
        compared = "tower and connector"
    for spec, card in parts:
        if card is None and encoder is not None:
            if (examined := report.attempt(_WHAT, partial(examine, encoder, model, spec=spec))) is not None:
                report.add("ok" if examined.is_sure else "warning", _WHAT, examined.sentence)
        elif card is None:
            sentence = f"`{spec.encoder}` does not name its model, so it cannot be compared with this one"
            report.add("warning", _WHAT, sentence)
        elif report.passes(_WHAT, partial(check_card, card, model, spec=spec)):
            report.add("ok", _WHAT, f"`{spec.encoder}` is this model's own, by {compared}")


def _load(part: _Part) -> LoadedModel:
    """The model without its decoder's tensors, which may not fit into memory."""
    spec = dataclasses.replace(part.spec, precision=None)
    return stream_model(spec, dtype=torch.float16, encoder=part.card, is_encoded_elsewhere=True)[0]
