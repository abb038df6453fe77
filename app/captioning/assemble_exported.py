"""From a spec with an exported decoder to a captioner's parts. With an exported encoder, torch is not imported."""

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from llama_adapter.app.captioning.parts import GraphBackend, Parts, template_id, without_misled_detector
from llama_adapter.app.models.exported import (
    FOR_ATC,
    MINDIR,
    ExportedModel,
    check_fingerprint,
    encoder_graph,
    output_name,
    read_exported_model,
)
from llama_adapter.app.models.spec import AUTO, DEFAULT_BATCH_SIZE, EXPORTED, CaptionerSpec, ModelInfo
from llama_adapter.app.pictures.prefixes.file import Encoding, check_keys_values, read_first_file
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.exported.card import EXPORT_AGAIN
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.llm.exported.om_steps import open_om_program
from llama_adapter.llm.exported.onnx_program import OnnxProgram
from llama_adapter.llm.exported.program import DecoderProgram
from llama_adapter.llm.exported.runner import ExportedRunner
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.weights.past import read_past
from llama_adapter.runtime.device_names import om_device_id
from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime, mindir_runtime
from llama_adapter.runtime.graphs.onnx_provider import provider_of_device
from llama_adapter.runtime.host_cpus import default_threads
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.vision.backends.base import EncodedBefore, NoEncoder, VisionBackend
from llama_adapter.vision.backends.exported import ExportedEncoder, open_encoder


def assemble_exported(spec: CaptionerSpec) -> Parts:
    """Open the graphs of `spec.decoder`, and the encoder that belongs to them.

    The encoder is `spec.encoder`, or the one in the folder, or torch's encoder of the model that the spec names. Raises
    GraphError for graphs that do not belong together, UsageError for options that do not fit the export, and the errors
    of the runtime that runs the graphs.
    """
    assert spec.decoder is not None, "the caller asks"
    exported = read_exported_model(spec.decoder)
    card = exported.card
    runtime = None
    if card.format == MINDIR:
        if spec.encoder is None and (spec.encoder_device is not None or spec.provider_option or spec.provider_config):
            raise UsageError(
                "encoder_device, provider_option and provider_config are not for MindIR: its encoder runs on `device`",
                hint="leave them out, or name another encoder",
            )
        runtime = mindir_runtime(spec.device, backend=spec.decoder_backend or "ms", config_path=spec.ge_config)
    elif spec.decoder_backend or spec.ge_config:
        raise UsageError(
            f"`{spec.decoder}` is an export as {card.format}, and decoder_backend and ge_config are for MindIR",
            hint="leave them out, or export the decoder with --format mindir",
        )
    config = card.config
    for name, flag in (("dtype", "--precision"), ("channel_order", "--channel-order")):
        own, wanted = getattr(card, name), getattr(spec, name)
        if wanted not in (AUTO, own):
            raise UsageError(
                f"The decoder in `{spec.decoder}` is exported with {name} {own}, and {name} is {wanted}",
                hint=f"leave out --{name.replace('_', '-')}: {flag} of `export decoder` decides on it",
            )
    if spec.context is not None and spec.context > config.context:
        raise UsageError(
            f"The decoder in `{spec.decoder}` takes {config.context} tokens at most, and context is {spec.context}",
            hint=f"export the decoder again with --context {spec.context}",
        )
    config = dataclasses.replace(config, context=spec.context or config.context)
    num_slots = DEFAULT_BATCH_SIZE if spec.batch_size == AUTO else spec.batch_size
    notes: tuple[str, ...] = ()
    with ExitStack() as stack:
        vision, identity, encodes_in = _open_vision(spec, exported, runtime=runtime)
        stack.enter_context(closing(vision))
        past = None if spec.past_key_values is None else read_past(Path(spec.past_key_values), config)
        program, most_tokens = open_program(spec, exported, num_slots=num_slots, runtime=runtime, past=past)
        stack.enter_context(closing(program))
        if past is not None and len(past) + 1 >= most_tokens:  # none are left for a prompt and its answer
            raise GraphError(
                f"`{spec.past_key_values}` holds {len(past)} tokens, and the gears of the decoder take {most_tokens}, "
                "with those of prompt and answer",
                hint="compile the decoder again with more cached positions, as --sizes P",
            )
        if most_tokens < config.context:
            notes = (f"the gears of the decoder take {most_tokens} tokens of prompt and answer together",)
            config = dataclasses.replace(config, context=most_tokens)
        keeps = card.picture_format is not None and program.keeps_prompts
        engine = EngineConfig(
            decoder=config,
            dtype=np.dtype(card.dtype),
            num_slots=num_slots,
            past=past,
            kept_places=config.context if keeps else 0,
        )
        runner = ExportedRunner(program, engine)
        stack.pop_all()
    exported = without_misled_detector(exported, spec, precision=encodes_in)
    if spec.vision_kind == "prefixes" and spec.encoder is not None:
        encoding = read_first_file(spec.encoder).encoding
        spec = dataclasses.replace(spec, **encoding.reading_of_pictures)
    spec = dataclasses.replace(
        spec,
        vision=spec.vision_kind,
        device=("cpu" if spec.device == AUTO else spec.device) if runtime is None else runtime.device,
        dtype=card.dtype,
        mode="eager",
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
        notes=notes,
        context=engine.context,
        default_prompt=card.prompt,
        has_adapter=bool(card.fingerprint) and card.picture_format is None,
        has_text_adapter=config.num_adapter_layers > 0 and not card.fingerprint,
        template=spec.prompt_template or card.template,
        template_id=template_id(
            spec.prompt_template or card.template,
            own=card.template,
            chat_template=exported.tokenizer.settings.chat_template,
        ),
        past=None if past is None else past.digest,
        picture_format=card.picture_format,
    )
    backend = GraphBackend(program.name)
    return Parts(spec=spec, info=info, model=exported, backend=backend, vision=vision, runner=runner, end=program.close)


def open_program(
    spec: CaptionerSpec,
    exported: ExportedModel,
    *,
    num_slots: int,
    runtime: MindirRuntime | None = None,
    past: PastKeyValues | None = None,
) -> tuple[DecoderProgram, int]:
    """Load the graphs of an exported decoder; returns the program and the maximum number of tokens of a row.

    There are `num_slots` slots; each begins with `past`. `runtime` is needed for MindIR only. Raises GraphError.
    """
    card, folder = exported.card, exported.folder
    if runtime is not None:
        return open_mindir_program(card, folder, runtime, num_slots=num_slots, past=past), card.config.context
    if card.format == "onnx":
        device, threads = "cpu" if spec.device == AUTO else spec.device, default_threads()
        provider = provider_of_device(device, options=spec.provider_option, config=spec.provider_config)
        program = OnnxProgram(card, folder, threads=threads, num_slots=num_slots, provider=provider, past=past)
        return program, card.config.context
    if card.format == FOR_ATC:
        try:
            device_id = 0 if spec.device == AUTO else om_device_id(spec.device)
        except ValueError as error:
            raise UsageError(f"device {spec.device} runs no OM: {error}", hint="leave out --device") from None
        return open_om_program(card, folder, device_id=device_id, num_slots=num_slots, past=past)
    raise GraphError(
        f"`{folder}` is an export as {card.format}, which is not run here", hint="export it with --format onnx"
    )


def _open_vision(
    spec: CaptionerSpec, exported: ExportedModel, *, runtime: MindirRuntime | None
) -> tuple[VisionBackend, str | None, Precision]:
    """The picture encoder, its identity in records (None if it is the model's own encoder), and its precision.

    The precision of prefix files' encoder is in the files.
    """
    if not exported.card.fingerprint:  # LLaMA alone, or with an adapter for texts
        return NoEncoder(), None, FLOAT
    if spec.encoder is not None and spec.vision_kind == "prefixes":
        return *_encoded_before(read_first_file(spec.encoder).encoding, exported, path=spec.encoder), FLOAT
    if spec.vision_kind == "torch":
        from llama_adapter.app.models.encoders import open_torch_encoder

        vision, precision = open_torch_encoder(spec, exported)
        return vision, None, precision
    path = spec.encoder or exported.encoder
    if path is None:
        raise GraphError(
            f"`{exported.folder}` has no picture encoder",
            hint="name an exported one as --encoder, or the model that the decoder was exported from",
        )
    if runtime is not None and spec.encoder is None:
        encoder = ExportedEncoder(runtime.open(Path(path)))
    else:
        encoder = open_encoder(encoder_graph(dataclasses.replace(spec, encoder=str(path))))
    encoder.vision = encoder.vision or exported.vision
    try:
        check_encoder(encoder, exported, path=str(path))
    except BaseException:
        encoder.close()
        raise
    return encoder, None, FLOAT


def _encoded_before(encoding: Encoding, exported: ExportedModel, *, path: str) -> tuple[VisionBackend, str | None]:
    """An encoder that passes on the visual queries of prefix files. Raises GraphError for files of another model."""
    card = exported.card
    if encoding.keeps == "queries":
        check_fingerprint(encoding.fingerprint, exported, what=f"The encoder of `{path}`", name=encoding.name)
    elif encoding.digest != card.digest:
        raise GraphError(
            f"The prefixes `{path}` hold keys and values of the model {encoding.name} ({encoding.digest[:12]}), and "
            f"the decoder in `{exported.folder}` is of {card.name} ({card.digest[:12]})",
            hint="name the decoder of the model that encoded them, or encode again without --keys-values",
        )
    made, wanted = encoding.card.output_shape, (card.config.num_queries, card.config.dim)
    order = encoding.vision.channel_order
    if made != wanted or order != card.channel_order:
        raise GraphError(
            f"The prefixes `{path}` hold {made[0]} visual queries of width {made[1]} in the colour order {order}, and "
            f"the decoder in `{exported.folder}` reads {wanted[0]} of width {wanted[1]} in {card.channel_order}",
            hint="encode the pictures again with the decoder's model",
        )
    check_keys_values(path, card.config)
    is_own = encoding.encoder is not None or (encoding.dtype, encoding.precision) == (card.dtype, card.precision)
    return EncodedBefore(encoding.vision), None if is_own else f"{encoding.dtype} {encoding.precision}"


def check_encoder(encoder: ExportedEncoder, exported: ExportedModel, *, path: str) -> None:
    """Raise GraphError unless the encoder was exported from the decoder's model."""
    config, pictures = exported.card.config, exported.card.picture_format
    wanted = config.num_queries if pictures is None else pictures.tokens_each, config.dim
    if any(have not in (-1, want) for have, want in zip(encoder.query_shape, wanted, strict=True)):
        raise GraphError(
            f"The encoder `{path}` makes {encoder.query_shape[0]} {output_name(pictures)} of width "
            f"{encoder.query_shape[1]}, and the decoder in `{exported.folder}` reads {wanted[0]} of width {wanted[1]}",
            hint="export both from one model",
        )
    if encoder.vision is None and pictures is not None:
        raise GraphError(
            f"The encoder `{path}` has no card, and that of the decoder in `{exported.folder}` does not say how it "
            "reads pictures",
            hint=EXPORT_AGAIN,
        )
    if encoder.image_size != encoder.pixels.image_size:
        raise GraphError(
            f"The encoder `{path}` takes pictures of {encoder.image_size} pixels, and the decoder in "
            f"`{exported.folder}` is of a model for {encoder.pixels.image_size}",
            hint="export both from one model",
        )
    if encoder.card is not None:
        check_fingerprint(encoder.card.fingerprint, exported, what=f"The encoder `{path}`", name=encoder.card.name)
