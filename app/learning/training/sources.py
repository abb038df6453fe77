"""Opens the model that a training starts from, unmerged: LLaMA, adapter and CLIP, from files or a bundle."""

# A adapter layers, N heads, Q queries, D model width

import dataclasses
import itertools
import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llama_adapter.app.learning.training.job import TrainingChoice
from llama_adapter.app.models import checkpoints
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.bundle_tensors import open_bundle, open_bundle_clip
from llama_adapter.app.models.checkpoints import LoadedModel, SourceFile, StoredQuestions
from llama_adapter.app.models.llama_folder import base_name, find_llama
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import training_template
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.weights.adapter import TEXT_QUERIES, AdapterFile, open_adapter
from llama_adapter.llm.weights.names import BIASED, LlamaSource, matrix_shapes, to_meta_order
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.config import ChannelOrder
from llama_adapter.vision.encoder import VisualQueryBlocks
from llama_adapter.vision.towers import ClipSource
from llama_adapter.vision.weights import visual_tensors

NEW_ADAPTER = "the new adapter"  # its name in messages
_LARGEST_GATE = 1 - 2.0**-12  # gates of a bundle are limited to it, because tanh is always below 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSources:
    """The parts of the model that a training starts from. `clip` is None for an adapter for texts."""

    name: str
    llama: LlamaSource
    adapter: AdapterFile
    clip: ClipSource | None
    visual_heads: int | None
    channel_order: ChannelOrder
    tokenizer: Tokenizer
    context: int
    questions: StoredQuestions = field(default_factory=StoredQuestions)
    template: Template = "instruction"  # of prompts
    files: tuple[SourceFile, ...] = ()
    bundle: str | None = None  # the bundle's folder, if the model is a bundle
    has_adapter_file: bool = True  # False: the adapter is new, or was in a bundle
    notes: tuple[str, ...] = ()  # messages to the user


def open_sources(spec: CaptionerSpec, choice: TrainingChoice, *, seed: int) -> TrainingSources:
    """Open the model of `spec`. A LLaMA without adapter gets a new adapter, initialised with `seed`.

    Raises CheckpointError, and UsageError for a model that cannot be trained.
    """
    if spec.lora:
        raise UsageError(
            "train takes no --lora: the result would not go with the LLaMA alone",
            hint="merge it first: `llama-adapter convert` with --lora, or PEFT's `merge_and_unload`",
        )
    if spec.decoder is not None or spec.past_key_values is not None:
        raise UsageError(
            "An exported decoder or past keys and values are not trained",
            hint="name a bundle as --model, or the LLaMA as --llama-dir",
        )
    if spec.llama_dir is None:
        return _of_bundle(bundle_folder(spec.model), spec)
    place = find_llama(spec.llama_dir, llama_type=spec.llama_type)
    adapter = None if spec.adapter is None else open_adapter(spec.adapter, for_texts=True)
    if adapter is not None and adapter.is_chat:
        raise UsageError(
            f"`{spec.adapter}` is an adapter of LLaMA-Adapter V2 for chat, and its biases and scales are not "
            "trained here",
            hint="adapters that see pictures and those of LLaMA-Adapter V1 can be trained",
        )
    tokenizer, llama, clip = checkpoints.open_llama_parts(place, adapter=adapter, clip=spec.clip)
    context = checkpoints.DEFAULT_CONTEXT if spec.context is None else spec.context
    files = tuple(SourceFile(role="llama", path=path) for path in llama.files)
    questions = StoredQuestions()
    if adapter is None:
        clip = checkpoints.open_clip(choice.clip) if choice.clip is not None else None
        adapter = new_adapter(llama, choice, clip=clip, seed=seed)
        order: ChannelOrder = "bgr" if spec.channel_order == "bgr" else "rgb"
        heads: int | None = choice.visual_heads
        name = shown_name(base_name(place.folder))
    else:
        assert spec.adapter is not None, "it was opened"
        order, _ = checkpoints.resolve_channel_order(spec.channel_order, adapter)
        heads = checkpoints.query_heads(spec, adapter)
        name = checkpoints.adapter_name(spec.adapter)
        files += (SourceFile(role="adapter", path=str(spec.adapter)),)
        questions = checkpoints.declared_questions(adapter).of_captions
    if not any(key.endswith(".bias") for key in adapter.llama):  # it gets those of the LLaMA, if there are some
        adapter = dataclasses.replace(adapter, llama={**adapter.llama, **_biases(llama)})
    return TrainingSources(
        name=name,
        llama=llama,
        adapter=adapter,
        clip=clip,
        visual_heads=heads,
        channel_order=order,
        tokenizer=tokenizer,
        context=context,
        questions=questions,
        template=training_template(spec),
        files=files,
        bundle=str(place.folder) if place.form == "bundle" else None,
        has_adapter_file=spec.adapter is not None,
    )


def _biases(llama: LlamaSource) -> dict[str, Tensor]:
    """The biases of a LLaMA that an adapter's file holds, in float32 and Meta's order; empty if there are none."""
    found: dict[str, Tensor] = {}
    shapes = matrix_shapes(llama.config)
    for layer, matrix in itertools.product(range(llama.config.num_layers), BIASED):
        name = f"layers.{layer}.{matrix}.bias"
        stored = llama.tensors[name].read().float() if name in llama.tensors else torch.zeros(shapes[matrix][0])
        found[name] = to_meta_order(matrix, stored, llama.config) if llama.half_split else stored
    return found if any(name in llama.tensors for name in found) else {}


@again_if_replaced
def _of_bundle(folder: str | os.PathLike[str], spec: CaptionerSpec) -> TrainingSources:
    llama = open_bundle(folder)
    model = load_bundle(folder, context=spec.context, channel_order=spec.channel_order, precision=FLOAT)
    adapter, notes = _bundle_adapter(model, llama, name=str(folder))
    return TrainingSources(
        name=model.name,
        llama=llama,
        adapter=adapter,
        clip=open_bundle_clip(folder),
        visual_heads=model.vision_config.query.num_heads,
        channel_order=model.vision_config.channel_order,
        tokenizer=model.tokenizer,
        context=model.decoder_config.context,
        questions=StoredQuestions(prompt=model.prompt, question=model.question).of_captions,
        template=training_template(spec),
        files=model.sources,
        bundle=str(folder),
        has_adapter_file=False,
        notes=notes,
    )


def _bundle_adapter(model: LoadedModel, llama: LlamaSource, *, name: str) -> tuple[AdapterFile, tuple[str, ...]]:
    """The adapter in a bundle, with the gates before tanh, and messages to the user."""
    config, state = model.decoder_config, model.decoder_state
    if not config.num_adapter_layers or not model.vision_state:
        raise UsageError(
            f"`{name}` has no adapter for pictures, so there is nothing to train in it",
            hint="name it as --llama-dir, and a CLIP as --clip for pictures, to train a new adapter",
        )
    folded_AN = state["adapter.gates"].double()
    notes: tuple[str, ...] = ()
    num_large = int((folded_AN.abs() > _LARGEST_GATE).sum())
    if num_large:
        notes = (
            f"{num_large} of the {folded_AN.numel()} gates of `{name}` are 1 or almost 1, which tanh does not reach: "
            f"they start at {_LARGEST_GATE:.4f}",
        )
    gates_AN = folded_AN.clamp(-_LARGEST_GATE, _LARGEST_GATE).atanh().float()
    found: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        j = layer - config.first_adapter_layer
        gate = gates_AN[j] if j >= 0 else torch.zeros(config.num_heads)
        found[f"layers.{layer}.attention.gate"] = gate.reshape(1, -1, 1, 1)
    found |= _biases(llama)
    norms = {key: split.read().float() for key, split in llama.tensors.items() if "norm" in key}
    query = {key.removeprefix("query."): value.float() for key, value in model.vision_state.items()}
    visual = visual_tensors(query, depth=model.vision_config.query.depth)
    queries = state["adapter.queries"].float().flatten(0, 1)
    adapter = AdapterFile(name=name, queries=queries, visual=visual, llama=found | norms, clip={}, declares={})
    return adapter, notes


def new_adapter(llama: LlamaSource, choice: TrainingChoice, *, clip: ClipSource | None, seed: int) -> AdapterFile:
    """A new adapter, initialised like the reference implementation: its gates are 0, so it has no effect yet."""
    most, dim = llama.config.num_layers, llama.config.dim
    num_layers = choice.num_adapter_layers(most)
    if not 1 <= num_layers <= most:
        raise UsageError(f"adapter_layers must lie in 1..{most}, the layers of the LLaMA, got {num_layers}")
    if clip is None and choice.num_queries != TEXT_QUERIES:
        raise UsageError(
            f"An adapter for texts has {TEXT_QUERIES} queries in each layer, got {choice.num_queries}",
            hint="name a CLIP as --clip for an adapter that sees pictures",
        )
    visual: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        queries = torch.randn(num_layers * choice.num_queries, dim)
        if clip is not None:
            config = choice.query_config(output_dim=dim)
            blocks = VisualQueryBlocks(config, input_dim=clip.config.output_dim)
            visual = visual_tensors(blocks.requires_grad_(False).state_dict(), depth=config.depth)
    gates = {f"layers.{layer}.attention.gate": torch.zeros(1, llama.config.num_heads, 1, 1) for layer in range(most)}
    return AdapterFile(name=NEW_ADAPTER, queries=queries, visual=visual, llama=gates, clip={}, declares={})
