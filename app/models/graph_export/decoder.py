"""`export decoder`: a model's decoder as static graphs, with its tokenizer and its picture encoder, in one folder."""

import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.encoders import has_clip
from llama_adapter.app.models.exported import ENCODER_FILE, FAMILIAR_FILE
from llama_adapter.app.models.graph_export.mindir import export_mindir, settings_files
from llama_adapter.app.models.graph_export.output import check_place, give, tell, told_parity
from llama_adapter.app.models.graph_export.to_onnx import read_pixels
from llama_adapter.app.models.roofline import decoder_weights
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.exported.card import CARD_FILE, ExportCard, read_card
from llama_adapter.llm.exported.export import DECODER_FILE, Written, export_decoder
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.llm.exported.onnx_program import OnnxProgram
from llama_adapter.llm.exported.parity import DecoderParity, compare
from llama_adapter.llm.exported.program import DecoderProgram
from llama_adapter.llm.exported.weights_file import ExportPrecision
from llama_adapter.llm.load import place_decoder
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.atomic_write import refuse_to_replace, replace_folder
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.given import require_one_of
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from llama_adapter.runtime.graphs.sidecar import file_mark
from llama_adapter.runtime.partial import named_after, partial_folder
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.export import compare as compare_encoders
from llama_adapter.vision.export import export_onnx
from llama_adapter.vision.pixels import PixelRule

DecoderFormat = Literal["onnx", "onnx-atc", "mindir"]
_ROOM: Final = 1.2  # memory for a comparison: this factor times torch's float32 model plus twice the export


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderJob:
    """One run of `export decoder`."""

    spec: CaptionerSpec = field(default_factory=CaptionerSpec)  # the model
    out: str
    format: DecoderFormat = "onnx"
    precision: ExportPrecision = "float32"
    sampling: bool = True  # whether the graph draws tokens; if False, the host does
    encoder: bool = True  # whether to export the picture encoder too
    compare: bool = True  # whether to compare with torch, if memory is sufficient for both
    force: bool = False

    def __post_init__(self) -> None:
        require_one_of("format", self.format, get_args(DecoderFormat))
        require_one_of("precision", self.precision, get_args(ExportPrecision))
        if self.format != "onnx" and self.precision not in ("float32", "float16"):
            raise ValueError("precision int8 and int4 are onnxruntime's: other formats take float32 or float16")


def run_export_decoder(job: DecoderJob) -> None:
    """Export into a folder, which is created completely or not at all.

    Raises UsageError if the folder exists or contains other files than an export, CheckpointError, and GraphError if
    the graphs differ from torch's decoder.
    """
    out = Path(os.path.realpath(job.out))  # the target of a link is replaced, not the link
    _check_out(out, shown=job.out, force=job.force)
    check_place(out, shown=job.out, is_folder=True)
    started = time.perf_counter()
    model, tensors = stream_model(job.spec, dtype=torch.float32, is_encoded_elsewhere=True)
    for note in model.notes:
        tell(f"note: {note}")
    if job.spec.prompt_template is not None:  # records name a template that was asked for, so it is no part of exports
        tell("note: --prompt-template is left out: give it to the commands that answer with --decoder")
    tell(f"exporting the decoder of `{model.name}` as {job.format}, {job.precision}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with named_after(out), partial_folder(out) as partial:
        card = _write(job, model, tensors, partial)
        num_bytes = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        tell(f"exported {num_bytes / 1e6:,.1f} MB", started)
        if job.compare:
            _compare(job, card, partial)
        card.write(partial)
        _check_out(out, shown=job.out, force=job.force)  # another process may have created it meanwhile
        replace_folder(partial, out)
    give(job.out)
    if job.format != "onnx-atc":
        task = "caption PICTURE" if card.fingerprint else "generate --prompt TEXT"
        tell(f"next: llama-adapter {task} --decoder {shlex.quote(job.out)}")
    else:
        file = shlex.quote(os.path.join(job.out, DECODER_FILE))
        pictures, context = card.picture_format, card.config.context
        most = min(256 + (0 if pictures is None else pictures.most_tokens), context)  # tokens of a prompt
        # Gears for a prompt and for a token.
        sizes = f"--sizes R=1,S={most},P=1,T=1 --sizes R=1,S=1,P={min(most + 256, context)},T=1"
        tell(f"next: llama-adapter export om {file} --precision-mode origin {sizes}")


def _check_out(out: Path, *, shown: str, force: bool) -> None:
    """Raise UsageError unless `out` is free, or `force` is set and it is an empty folder or only an export."""
    refuse_to_replace([out], force=force)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    hint = "move what is yours elsewhere, or name another folder as --out"
    try:
        card = read_card(out)
    except GraphError:
        raise UsageError(f"`{shown}` is no exported decoder, so it is not replaced", hint=hint) from None
    owned = {CARD_FILE, *(Path(name).parts[0] for name in card.files)}
    if card.format == "mindir":  # settings files, which users may edit, have no digest
        owned |= settings_files(card.settings or {})
    strays = sorted(entry.name for entry in out.iterdir() if entry.name not in owned)
    if strays:
        raise UsageError(f"`{shown}` holds {list_keys(strays)} beside its export, so it is not replaced", hint=hint)


def _write(job: DecoderJob, model: LoadedModel, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> ExportCard:
    config = model.decoder_config
    is_mindir, graphs = job.format == "mindir", None
    sees_pictures = bool(model.vision_state)
    if is_mindir:
        dtype: Any = job.precision
        with_encoder = job.encoder and sees_pictures and _can_write_encoder(model)
        made = export_mindir(model, tensors, folder, dtype=dtype, sampling=job.sampling, encoder=with_encoder)
        written, graphs = Written(files=made.files, dtype=dtype, precision="float"), dict(made.graphs)
    else:
        storing: Any = "in_place" if job.format == "onnx" else "stacked"
        written = export_decoder(
            config,
            tensors,
            folder,
            precision=job.precision,
            storing=storing,
            sampling=job.sampling,
            embeddings=model.picture_format is not None,
        )
    files = [*written.files, *model.tokenizer.files]
    for name, content in model.tokenizer.files.items():
        (folder / name).write_bytes(content)
    if model.ood_detector is not None:
        model.ood_detector.save(folder / FAMILIAR_FILE)
        files.append(FAMILIAR_FILE)
    if job.encoder and sees_pictures and not is_mindir:
        files += _write_encoder(job, model, folder)
    rule = model.vision_config.clip.pixels
    is_clips = model.picture_format is None and rule == PixelRule(image_size=rule.image_size)
    return ExportCard(
        format=job.format,
        name=model.name,
        digest=model.digest,
        decoder=config.to_dict(),
        dtype=written.dtype,
        precision=written.precision,
        has_sampling=job.sampling,
        prompt=model.prompt,
        template=model.template,
        channel_order=model.vision_config.channel_order,
        fingerprint=dict(model.source.fingerprint) if sees_pictures else {},
        files={name: file_mark(folder / name) for name in files},
        settings=graphs,
        picture_format=model.picture_format,
        vision=model.vision_config.to_dict() if sees_pictures and not is_clips else None,
    )


def _can_write_encoder(model: LoadedModel) -> bool:
    if not has_clip(model):
        tell("without the picture encoder: CLIP's weights (--clip) are not at hand")
    elif model.precision != FLOAT:
        tell("without the picture encoder: it is exported from full weights, and this model has rounded ones")
    else:
        return True
    return False


def _write_encoder(job: DecoderJob, model: LoadedModel, folder: Path) -> list[str]:
    if not _can_write_encoder(model):
        return []
    state = {name: tensor.float() for name, tensor in model.vision_state.items()}
    dtype: Any = "float16" if job.precision == "float16" else "float32"
    made = folder / ENCODER_FILE
    export_onnx(model.vision_config, state, made, name=model.name, dtype=dtype)
    pixels_BHWC = read_pixels((), rule=model.vision_config.clip.pixels)
    parity = compare_encoders(made, encoder_from_state(model.vision_config, state), pixels_BHWC)
    if not parity.ok:
        raise GraphError(
            f"The exported encoder does not compute what torch does; {told_parity(parity)}",
            hint="export with --precision float32, or with --without-encoder",
        )
    tell(f"encoder: {told_parity(parity)}")
    return [file.name for file in folder.glob(f"{ENCODER_FILE}*")]


def _compare(job: DecoderJob, card: ExportCard, folder: Path) -> None:
    """Compare the graphs with torch's decoder, and print the differences.

    Raises GraphError for differences that rounding does not explain.
    """
    backend = open_backend("cpu")
    exported_bytes = sum((folder / name).stat().st_size for name in card.files)
    needed = _ROOM * (4 * decoder_weights(card.config) + 2 * exported_bytes)
    free = backend.free_bytes()
    if job.format == "onnx-atc" or (free is not None and free < needed):
        reason = (
            f"that needs {needed / 1e9:,.1f} GB of memory" if job.format != "onnx-atc" else "its runtime is not here"
        )
        tell(f"not compared with torch: {reason}")
        return
    started = time.perf_counter()
    model, tensors = stream_model(job.spec, dtype=torch.float32, is_encoded_elsewhere=True)
    operators: Any = "auto" if model.precision == FLOAT else "aten"  # graphs of rounded weights have float inputs too
    config = EngineConfig(decoder=model.decoder_config, dtype=torch.float32, operators=operators)
    reference = place_decoder(config, tensors, backend=backend).runner(3)
    assert isinstance(reference, EagerRunner | KernelRunner), "the CPU's runners are"
    program: DecoderProgram
    if job.format == "mindir":
        program = open_mindir_program(card, folder, MindirRuntime(), num_slots=3)
    else:
        program = OnnxProgram(card, folder, threads=torch.get_num_threads(), num_slots=3)
    parity = compare(program, reference)
    program.close()
    if not parity.is_ok(job.precision):
        raise GraphError(
            f"The exported decoder does not compute what torch does; {_told(parity)}",
            hint="float16 may be too narrow for these weights: export with --precision float32",
        )
    tell(f"decoder: {_told(parity)}", started)


def _told(parity: DecoderParity) -> str:
    return (
        f"largest difference of logits {parity.max_abs:.1e}, mean {parity.mean_abs:.1e}, at a magnitude of "
        f"{parity.magnitude:.1f}; {parity.num_same} of {parity.num_tokens} tokens are torch's"
    )
