"""The composition root: from a spec to a captioner. Whatever is `auto` or left open is settled here, once."""

import dataclasses

from app.bundle import load_bundle
from app.captioner import Captioner, ModelInfo
from app.checkpoints import LoadedModel, ModelSources, assemble_sources
from app.resources import embedded_model
from app.spec import CaptionerSpec
from llm.engine.engine import Engine
from llm.load import open_executor
from llm.runtime.backend import Backend, open_backend, resolve_dtype
from vision.backends.torch import TorchVisionBackend
from vision.encoder import encoder_from_state


def assemble(spec: CaptionerSpec) -> Captioner:
    """Load the model of `spec` onto its device.

    Raises DeviceError, CheckpointError and VisionCheckpointError; the errors say what to do.
    """
    backend = open_backend(spec.device)
    model = load_model(spec, backend=backend)
    spec = dataclasses.replace(
        spec,
        device=str(backend.device),
        context=model.decoder_config.context,
        channel_order=model.vision_config.channel_order,
    )
    encoder = encoder_from_state(model.vision_config, model.vision_state)
    executor = open_executor(model.decoder_config, model.decoder_state, backend=backend, num_slots=spec.batch_size)
    return Captioner(
        spec=spec,
        info=ModelInfo(
            name=model.name,
            digest=model.digest,
            device=backend.name,
            dtype=spec.dtype,
            context=model.decoder_config.context,
            default_prompt=model.prompt,
        ),
        vision=TorchVisionBackend(encoder, device=backend.device),
        engine=Engine(executor, eos_id=model.tokenizer.eos_id),
        tokenizer=model.tokenizer,
        synchronise=backend.synchronise,
    )


def load_model(spec: CaptionerSpec, *, backend: Backend) -> LoadedModel:
    """The weights of `spec` on the CPU, in its dtype."""
    dtype = resolve_dtype(spec.dtype, backend=backend)
    if spec.llama_dir is None:
        return load_bundle(
            embedded_model() if spec.model is None else spec.model,
            dtype=dtype,
            context=spec.context,
            channel_order=None if spec.channel_order == "auto" else spec.channel_order,
        )
    assert spec.adapter is not None, "the spec checks that an adapter goes with llama_dir"
    sources = ModelSources(
        llama_dir=spec.llama_dir,
        llama_type=spec.llama_type,
        adapter=spec.adapter,
        clip=spec.clip,
        visual_heads=spec.visual_heads,
        channel_order=spec.channel_order,
        context=spec.context,
    )
    return assemble_sources(sources, dtype=dtype)
