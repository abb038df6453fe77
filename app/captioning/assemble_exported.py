"""From a spec with an exported decoder to its parts. With an exported encoder too, torch is not imported."""

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.models.exported_model import MINDIR, ExportedModel, check_fingerprint, read_exported_model
from llama_adapter.app.models.spec import AUTO, DEFAULT_BATCH_SIZE, EXPORTED, CaptionerSpec, ModelInfo
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.llm.exported.onnx_program import OnnxProgram
from llama_adapter.llm.exported.program import DecoderProgram
from llama_adapter.llm.exported.runner import ExportedRunner
from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime, mindir_runtime
from llama_adapter.runtime.graphs.open_session import GraphSpec, default_threads
from llama_adapter.vision.backends.base import NoEncoder, VisionBackend
from llama_adapter.vision.backends.exported import ArrayEncoder, ExportedEncoder, open_encoder


class GraphBackend:
    """Stands where torch's devices stand: graphs run when they are called, and return when they are done."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, "cpu"

    def empty_caches(self) -> None:
        """Nothing is cached."""

    def synchronise(self) -> None:
        """Nothing is queued."""

    def mark(self) -> None:
        """Nothing is queued."""

    def profiler(self, folder: Path) -> Any:
        """Raises UsageError: the profiler is torch's."""
        raise UsageError(
            "An exported decoder has no trace: the profiler is torch's", hint="leave out --trace, or --decoder"
        )


def assemble_exported(spec: CaptionerSpec) -> Parts:
    """Open the graphs of `spec.decoder`, and the encoder that belongs to them.

    The encoder is `spec.encoder`, the one in the folder, or torch's of the model that the spec names. Raises GraphError
    for graphs that do not belong together, and as what runs them.
    """
    assert spec.decoder is not None, "the caller asks"
    exported = read_exported_model(spec.decoder)
    card = exported.card
    runtime = None
    if card.format == MINDIR:
        runtime = mindir_runtime(spec.device, backend=spec.decoder_backend or "ms", config_path=spec.ge_config)
    if runtime is None and spec.device not in (AUTO, "cpu"):
        raise UsageError(
            f"device {spec.device}: an ONNX decoder runs on the CPU here", hint="leave out --device, or --decoder"
        )
    if runtime is None and (spec.decoder_backend or spec.ge_config):
        raise UsageError(
            f"`{spec.decoder}` is an export as {card.format}, and decoder_backend and ge_config are for MindIR",
            hint="leave them out, or export the decoder with --format mindir",
        )
    config = card.config
    if spec.dtype not in (AUTO, card.dtype):
        raise UsageError(
            f"The decoder in `{spec.decoder}` computes in {card.dtype}, and dtype is {spec.dtype}",
            hint="leave out --dtype, or export the decoder again",
        )
    if spec.context is not None and spec.context > config.context:
        raise UsageError(
            f"The decoder in `{spec.decoder}` takes {config.context} tokens at most, and context is {spec.context}",
            hint=f"export the decoder again with --context {spec.context}",
        )
    config = dataclasses.replace(config, context=spec.context or config.context)
    num_slots = DEFAULT_BATCH_SIZE if spec.batch_size == AUTO else spec.batch_size
    with ExitStack() as stack:
        vision, identity = _open_vision(spec, exported, runtime=runtime)
        stack.enter_context(closing(vision))
        program = open_program(exported, num_slots=num_slots, runtime=runtime)
        engine = EngineConfig(decoder=config, dtype=np.dtype(card.dtype), num_slots=num_slots)
        runner = ExportedRunner(program, engine)
        stack.pop_all()
    kind: Any = "torch" if not isinstance(vision, ArrayEncoder) else _kind(vision.inner)
    spec = dataclasses.replace(
        spec,
        vision=kind if kind == "torch" or spec.encoder is not None else None,
        device="cpu" if runtime is None else runtime.device,
        dtype=card.dtype,
        batch_size=num_slots,
        context=config.context,
        channel_order="bgr" if card.channel_order == "bgr" else "rgb",
    )
    info = ModelInfo(
        name=card.name,
        digest=exported.identity,
        device=program.name,
        dtype=card.dtype,
        precision=card.precision,  # type: ignore[arg-type]  # int4 too
        vision=vision.name,
        mode=EXPORTED,
        operators="graph",
        encoder=identity,
        notes=(),
        context=config.context,
        default_prompt=card.prompt,
        has_adapter=config.num_adapter_layers > 0,
    )
    backend = GraphBackend(program.name)
    return Parts(spec=spec, info=info, model=exported, backend=backend, vision=vision, runner=runner)


def open_program(exported: ExportedModel, *, num_slots: int, runtime: MindirRuntime | None = None) -> DecoderProgram:
    """The graphs of an exported decoder, loaded, with `num_slots` slots; `runtime` is for MindIR. Raises GraphError."""
    if runtime is not None:
        return open_mindir_program(exported.card, exported.folder, runtime, num_slots=num_slots)
    if exported.card.format != "onnx":
        raise GraphError(
            f"`{exported.folder}` is an export as {exported.card.format}, which is not run here",
            hint="export the decoder with --format onnx",
        )
    return OnnxProgram(exported.card, exported.folder, threads=default_threads(), num_slots=num_slots)


def _open_vision(
    spec: CaptionerSpec, exported: ExportedModel, *, runtime: MindirRuntime | None
) -> tuple[VisionBackend, str | None]:
    """The picture encoder, and its identity in records; None where it is the model's own."""
    if not exported.card.config.num_adapter_layers:
        return NoEncoder(), None
    if spec.encoder is not None:
        kind: Any = spec.vision_kind
        graph = GraphSpec(
            kind=kind, path=spec.encoder, device_id=spec.encoder_device or 0, own_process=spec.encoder_process
        )
        encoder = _open_checked(graph, exported)
        return ArrayEncoder(encoder), None
    if spec.model is not None or spec.llama_dir is not None:
        from llama_adapter.app.captioning.torch_encoder import open_torch_encoder

        return open_torch_encoder(spec, exported), None
    if exported.encoder is None:
        raise GraphError(
            f"`{exported.folder}` has no picture encoder",
            hint="name an exported one as --encoder, or the model that the decoder was exported from",
        )
    if runtime is not None:
        return ArrayEncoder(ExportedEncoder(runtime.open(exported.encoder))), None
    graph = GraphSpec(kind="onnx", path=str(exported.encoder), own_process=spec.encoder_process)
    return ArrayEncoder(_open_checked(graph, exported)), None


def _open_checked(graph: GraphSpec, exported: ExportedModel) -> ExportedEncoder:
    encoder = open_encoder(graph)
    try:
        check_encoder(encoder, exported, path=graph.path)
    except BaseException:
        encoder.close()
        raise
    return encoder


def check_encoder(encoder: ExportedEncoder, exported: ExportedModel, *, path: str) -> None:
    """Raise GraphError unless an encoder was exported from the model of the decoder."""
    config = exported.card.config
    wanted = config.num_queries, config.dim
    if any(have not in (-1, want) for have, want in zip(encoder.query_shape, wanted, strict=True)):
        raise GraphError(
            f"The encoder `{path}` makes {encoder.query_shape[0]} visual queries of width {encoder.query_shape[1]}, "
            f"and the decoder in `{exported.folder}` reads {wanted[0]} of width {wanted[1]}",
            hint="export both from one model",
        )
    if encoder.card is not None:
        check_fingerprint(encoder.card.fingerprint, exported, what=f"The encoder `{path}`", name=encoder.card.name)


def _kind(encoder: ExportedEncoder) -> str:
    return "om" if encoder.session.info.file.endswith(".om") else "onnx"
