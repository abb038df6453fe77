"""From a spec to a captioner's parts for a model that the package transformers runs: texts only, without kernels."""

from typing import Final

from llama_adapter.app.captioning.parts import Parts, loaded_parts
from llama_adapter.app.models.bundle_manifest import no_vision
from llama_adapter.app.models.checkpoints import (
    CHAT_CONTEXT,
    DEFAULT_CONTEXT,
    SourceFile,
    digest_of,
)
from llama_adapter.app.models.described import DescribedModel
from llama_adapter.app.models.llama_folder import LlamaFolder, base_name
from llama_adapter.app.models.number_formats import best_dtype
from llama_adapter.app.models.spec import AUTO, DEFAULT_BATCH_SIZE, CaptionerSpec
from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.memory_plan import MemoryPlan, check_memory
from llama_adapter.llm.runners.foreign import ForeignRunner
from llama_adapter.llm.weights.foreign import count_weights, open_foreign, read_foreign
from llama_adapter.llm.weights.huggingface import weight_files
from llama_adapter.runtime.devices import EAGER, open_backend, open_best, resolve_dtype
from llama_adapter.runtime.errors import CheckpointError, DeviceError, UsageError
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.backends.base import NoEncoder

# Fields of a spec that need this package's own decoder, with the values that do not.
_OWN: Final = {
    "lora": ((),),
    "past_key_values": (None,),
    "precision": (None, FLOAT),
    "operators": (AUTO, "aten"),
    "tensor_parallel": (1,),
    "encoder": (None,),
}


def assemble_foreign(spec: CaptionerSpec, place: LlamaFolder) -> Parts:
    """Load the model of a folder onto the device of `spec`.

    A graph mode becomes eager, with a note, unless the spec is strict. Raises UsageError for what only this package's
    own decoder does, DeviceError, and CheckpointError for a damaged folder or one that needs code.
    """
    if given := [name for name, values in _OWN.items() if getattr(spec, name) not in values]:
        raise UsageError(
            f"The model in `{place.folder}` runs through transformers, without {', '.join(given)}",
            hint="leave these settings out",
        )
    config, tokenizer = read_foreign(place.folder), place.open_tokenizer()
    own: Template = "instruction" if tokenizer.settings.chat_template is None else "chat"
    template = spec.prompt_template or own
    longest = getattr(config, "max_position_embeddings", None) or spec.context or CHAT_CONTEXT
    context = spec.context or min(DEFAULT_CONTEXT if template == "instruction" else CHAT_CONTEXT, longest)
    if context > longest or tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"The model in `{place.folder}` has {longest} positions and {config.vocab_size} tokens, and wanted are "
            f"{context} (context) and {tokenizer.vocab_size} (its tokenizer)",
            hint="pass a smaller --context, or copy the tokenizer of this model into its folder",
        )
    backend, why = open_best() if spec.device == AUTO else (open_backend(spec.device), "")
    if spec.mode not in (AUTO, EAGER) and spec.strict:
        raise DeviceError("transformers runs without graphs, so mode must be eager", hint="leave out --strict")
    mode_note = "" if spec.mode in (AUTO, EAGER) else f"steps run eager: mode `{spec.mode}` is not used"
    num_weights = count_weights(config)
    dtype = best_dtype(num_weights, backend) if spec.dtype == AUTO else resolve_dtype(spec.dtype, backend=backend)
    # Of its sizes, the engine needs these two. The others are nominal, the smallest possible.
    decoder = DecoderConfig(
        vocab_size=tokenizer.vocab_size, context=context, dim=2, num_layers=1, num_heads=1, ffn_dim=1, norm_eps=1e-5
    )
    num_slots = DEFAULT_BATCH_SIZE if spec.batch_size == AUTO else spec.batch_size
    engine = EngineConfig(decoder=decoder, dtype=dtype, num_slots=num_slots)
    plan = MemoryPlan(weights=num_weights * dtype.itemsize, slots=0, activations=0)
    check_memory(plan, engine, free=backend.free_bytes(), device=backend.name)
    files = [*weight_files(place.folder), place.folder / "config.json"]
    sources = [SourceFile(role="llama", path=str(file)) for file in files]
    sources.append(SourceFile(role="tokenizer", path=str(place.require_tokenizer())))
    model = open_foreign(place.folder, config, dtype=dtype).to(backend.device)
    name, vision = shown_name(base_name(place.folder)), no_vision(decoder)
    note = f"`{name}` ({config.model_type}) runs through transformers: for texts, without this program's kernels"
    return loaded_parts(
        spec,
        DescribedModel(
            name=name,
            digest=digest_of(sources, vision, decoder),
            vision_config=vision,
            decoder_config=decoder,
            tokenizer=tokenizer,
            template=own,
        ),
        backend=backend,
        vision=NoEncoder(),
        runner=ForeignRunner(model, engine, backend=backend),
        dtype=dtype_name(dtype),
        mode=EAGER,
        is_for_texts=True,
        notes=(note, why and f"computing on {backend.name}: {why}", mode_note),
    )
