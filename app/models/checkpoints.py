"""Loads a model from LLaMA, adapter and CLIP checkpoints: finds the files and checks that they fit together.

Only `llm.weights` and `vision.weights` know the names inside the files.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, ParamSpec, get_args

import torch
from torch import Tensor

from llama_adapter.app.models.bundle_manifest import MANIFEST, check_halves, is_question, no_vision
from llama_adapter.app.models.bundle_tensors import open_bundle, open_bundle_clip
from llama_adapter.app.models.connected import open_connected
from llama_adapter.app.models.described import DEFAULT_PROMPT, DescribedModel
from llama_adapter.app.models.llama_folder import LlamaFolder, base_name, find_llama
from llama_adapter.app.models.number_formats import Dtype, dtype_of
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.pieces.folder import find_template
from llama_adapter.llm.split import share_of
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.weights.adapter import AdapterFile, open_adapter
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.gguf import open_gguf
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.lora import LoraFolder, merged_source, open_loras
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.mindspore import open_mindspore
from llama_adapter.llm.weights.names import LlamaSource
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.state import drained
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.files import read_tensor_file
from llama_adapter.runtime.text import shown_excerpt, shown_name
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import VIT_L_14, ChannelOrder, VisionConfig
from llama_adapter.vision.formats import WantedOrder
from llama_adapter.vision.towers import ClipSource, clip_files, configs_beside, read_clip
from llama_adapter.vision.weights import KNOWN_VISUAL_HEADS, build_vision, read_query

DEFAULT_CONTEXT = 512
CHAT_CONTEXT = 2048  # as in the published chat demo, whose example alone has about 400 tokens
PICTURE_PROMPT: Final = "Describe this image."  # for captions of models without an adapter
NO_TEMPLATE: Final = (
    "its folder has no chat template, so prompts have the format of instructions, which it may not know: copy its "
    "chat_template.json or chat_template.jinja there"
)
NO_PIXELS: Final = (
    "its folder does not say how pictures become pixels, so that is as in the published models with such a tower: copy "
    "its preprocessor_config.json there"
)
TEMPLATE_KEY: Final = "template"  # in the config of an adapter's file
TOWER_KEY: Final = "tower"  # likewise
# `StoredQuestions` -> its entries in the config of an adapter's file.
QUESTION_KEYS: Final[Mapping[str, str]] = {"prompt": "caption_prompt", "question": "question"}
CLIP_FILE = "ViT-L-14.pt"  # the name under which OpenAI publishes it
CLIP_CACHE = Path("~/.cache/clip")  # where OpenAI's own package keeps it

# The public releases, by the SHA-256 of their files. They were trained on pictures in OpenCV's order B, G, R.
RELEASED_ADAPTERS = {
    "7fa55208379faf2dd862565284101b0e4a2a72114d6490a95e432cf9d9b6c813": "BIAS-7B",
    "1bcbffc43484332672092e0024a8699a6eb5f558161aebf98a7c6b1db67224d1": "LORA-BIAS-7B",
    "5088aeb63a89746b90bcfd5cb819e1c7411b2771b267c6d131ce73e250a8abf0": "CAPTION-7B",
    "d26d107eec32127ac86ef1997cf7169de1c56a59c539fc1258c6798b969e289c": "LORA-BIAS-7B-v21",
}
_RELEASED_WIDTH = 4096  # all of them extend LLaMA-7B

_P = ParamSpec("_P")

_OPENERS = {
    "meta": open_meta,
    "huggingface": open_huggingface,
    "mindspore": open_mindspore,
    "gguf": open_gguf,
    "bundle": open_bundle,
}

Role = Literal["llama", "tokenizer", "adapter", "clip", "lora"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file from which a model was made. `sha256` is None if it was not computed."""

    role: Role
    path: str
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Source model of quantised or packed weights: its digest and its encoder's fingerprint (`runtime.graphs.card`)."""

    digest: str
    fingerprint: Mapping[str, str]
    calibration_pictures: int = 0  # pictures that the rounding was fitted to; 0: rounded to nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredQuestions:
    """The questions that a model stores."""

    prompt: str = DEFAULT_PROMPT  # for captions
    question: str | None = None  # that it learned for all other examples; None: it learned none, or several

    @property
    def of_captions(self) -> "StoredQuestions":
        """The questions for a training on this model. Its captions do not get the question that it learned instead."""
        return replace(self, prompt=DEFAULT_PROMPT) if self.prompt == self.question else self


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel(DescribedModel):
    """Encoder and decoder of a model, as state dicts for `PictureEncoder` and `LlamaAdapterDecoder`."""

    vision_state: dict[str, Tensor]  # empty after the encoder was put on its device
    decoder_state: dict[str, Tensor]  # empty if the decoder is streamed
    dtype: torch.dtype  # of all tensors except those of quantised weights
    sources: tuple[SourceFile, ...]
    # What was merged into the weights: "gates", "lora" and "scales" of an adapter, with its norms and biases,
    # "lora:NAME=WEIGHT" of PEFT, and "folded": factors of a family.
    merged: tuple[str, ...]
    origin: Origin | None = None  # if weights are or were quantised or packed
    input_scales: Mapping[str, Tensor] = field(default_factory=dict)  # see `input_scales.py`
    # The weights of linear layers that have another precision than `precision`.
    finer_weights: Mapping[str, Precision] = field(default_factory=dict)
    packed: PackedLayout | None = None  # layout of the linear layers' weights, if packed for kernels

    @property
    def source(self) -> Origin:
        """The model that the weights were made from: `origin`, or this model itself."""
        return self.origin or Origin(digest=self.digest, fingerprint=fingerprint(self.vision_state))


# A model with an empty `decoder_state`, and an iterator that makes the decoder's tensors, for models larger than
# memory.
StreamedModel = tuple[LoadedModel, Iterator[tuple[str, Tensor]]]


def whole(stream: Callable[_P, StreamedModel]) -> Callable[_P, LoadedModel]:
    """`stream`, but with the decoder's tensors in the model's `decoder_state`."""

    @functools.wraps(stream)
    def load(*arguments: _P.args, **options: _P.kwargs) -> LoadedModel:
        model, tensors = stream(*arguments, **options)
        return dataclasses.replace(model, decoder_state=dict(tensors))

    return load


def streamed(model: LoadedModel) -> StreamedModel:
    """Turn a model with its decoder in memory into a streamed one; `decoder_state` is emptied as tensors are taken."""
    return dataclasses.replace(model, decoder_state={}), drained(model.decoder_state)


class LlamaParts(NamedTuple):
    """What a LLaMA folder holds, opened."""

    tokenizer: Tokenizer
    llama: LlamaSource
    clip: ClipSource | None  # None: none is needed


class LoadedEncoder(NamedTuple):
    """A picture encoder's configuration and state dict, and the model's name for display."""

    name: str
    config: VisionConfig
    state: dict[str, Tensor]


def stream_sources(
    spec: CaptionerSpec,
    *,
    dtype: Dtype | None,
    precision: Precision = FLOAT,
    exported: bool = False,
    encoder: EncoderCard | None = None,
    ranks: Alone = ALONE,
) -> StreamedModel:
    """Read the model of `llama_dir` and what goes with it onto the CPU, its weights in `dtype`.

    Of the spec, only the fields that name the model count. With a `precision` of fewer bits, weights keep the dtype of
    their files, to be quantised later, and the model computes in `dtype`. With None, they keep it too.

    With `ranks`, the decoder's tensors are this process's share, and no other weights are read. With an `exported`
    encoder, CLIP may be missing; `encoder` is the exported encoder's card, if it has one. A model that sees no pictures
    has an encoder's configuration of nominal sizes, and no weights for it.

    Raises CheckpointError, before the first tensor is read, if a part is missing, damaged, of another kind, or does not
    fit the other parts.
    """
    assert spec.llama_dir is not None, "the caller asks"
    place = find_llama(spec.llama_dir, llama_type=spec.llama_type)
    tokenizer_file = place.require_tokenizer()
    adapter = None if spec.adapter is None else open_adapter(spec.adapter, for_texts=True)
    sees_tokens = adapter is None and place.sees_tokens
    tokenizer, llama, clip = open_llama_parts(place, adapter=adapter, clip=spec.clip)
    sight = open_connected(place.folder, tokenizer, dim=llama.config.dim) if sees_tokens else None
    contained = llama.merged
    llama, loras = merge_loras(spec.lora, llama, adapter)
    base = base_name(place.folder)
    files = [SourceFile(role="llama", path=path) for path in llama.files]
    files.append(SourceFile(role="tokenizer", path=str(tokenizer_file)))
    seen: Collection[Tensor] = ()  # of the encoder
    notes: tuple[str, ...] = ()
    channel_order: ChannelOrder = "rgb"
    heads: int | None = None
    if adapter is None:
        has_chats = tokenizer.settings.chat_template is not None
        template: Template = "chat" if has_chats else "instruction"
        name, questions = shown_name(base), StoredQuestions()
        if sight is not None:
            questions = StoredQuestions(prompt=PICTURE_PROMPT)
            seen = sight.tensors.values()
            files += [SourceFile(role="clip", path=path) for path in sight.files]
            notes = (*(() if has_chats else (NO_TEMPLATE,)), *(() if sight.files else (NO_PIXELS,)))
    else:
        name, template, questions = adapter_name(adapter.name), declared_template(adapter), declared_questions(adapter)
        channel_order, adapter_digest = resolve_channel_order(spec.channel_order, adapter)
        files.append(SourceFile(role="adapter", path=adapter.name, sha256=adapter_digest))
        if adapter.sees_pictures:
            is_unread = exported and (clip is None or ranks is not ALONE)  # the encoder is neither written nor compared
            heads = query_heads(spec, adapter, exported=is_unread, encoder=encoder)
        seen = adapter.visual.values()
        if clip is not None:
            seen = [*seen, *clip.tensors.values()]
            if not adapter.clip:
                files.append(SourceFile(role="clip", path=clip.name))
    usual = DEFAULT_CONTEXT if template == "instruction" else CHAT_CONTEXT
    if sight is not None:
        usual = max(CHAT_CONTEXT, sight.format.most_tokens + CHAT_CONTEXT // 2)
    context = usual if spec.context is None else spec.context
    decoder_config = plan_decoder(llama, adapter, vocab_size=tokenizer.vocab_size, context=context)
    computed = None if dtype is None else dtype_of(dtype, decoder=decoder_config, encoder=seen, precision=precision)
    # Weights are quantised from the values in the files, so that they are rounded only once.
    chosen = computed if precision == FLOAT else None
    vision_config, vision_state = no_vision(decoder_config), dict[str, Tensor]()
    if sight is not None:
        order = sight.config.channel_order if spec.channel_order == "auto" else spec.channel_order
        vision_config = dataclasses.replace(sight.config, channel_order=order)
        vision_state = {ours: tensor.to(chosen or tensor.dtype).contiguous() for ours, tensor in sight.tensors.items()}
    elif adapter is not None and adapter.sees_pictures:
        if clip is None and exported:  # the exported encoder contains CLIP
            query, state = read_query(adapter.visual, name=adapter.name, visual_heads=heads)
            tower = VIT_L_14 if encoder is None else encoder.vision.clip  # default: the CLIP of the released adapters
            vision_config = VisionConfig(clip=tower, query=query, channel_order=channel_order)
            vision_state = {f"query.{ours}": tensor for ours, tensor in state.items()}
        else:
            vision_config, vision_state = build_vision(
                adapter.visual,
                name=adapter.name,
                clip=clip,
                visual_heads=heads,
                channel_order=channel_order,
                dtype=chosen,
            )
        check_halves(vision_config, decoder_config, adapter=adapter.name)
    model = LoadedModel(
        name=name,
        digest=digest_of(files, vision_config, decoder_config),
        vision_config=vision_config,
        vision_state=vision_state,
        decoder_config=decoder_config,
        decoder_state={},
        tokenizer=tokenizer,
        dtype=computed or torch.float32,
        sources=tuple(files),
        merged=contained if adapter is None else merged_with(adapter, contained),
        prompt=questions.prompt,
        question=questions.question,
        template=template,
        picture_format=None if sight is None else sight.format,
        notes=notes,
    )
    share = share_of(decoder_config, ranks)
    tensors = decoder_tensors(
        decoder_config, source=llama, adapter=adapter, dtype=chosen, scale_dtype=computed, share=share
    )
    return with_loras(model, loras, base=base), tensors


def merge_loras(
    texts: Sequence[str], llama: LlamaSource, adapter: AdapterFile | None = None
) -> tuple[LlamaSource, tuple[LoraFolder, ...]]:
    """Merge LoRA folders into a LLaMA. Raises CheckpointError also if the adapter's file replaces what they change."""
    loras = open_loras(texts, llama.config, contained=llama.contained, name=llama.name)
    for lora in loras:
        if adapter is not None and (replaced := [name for name in lora.changes if name in adapter.llama]):
            raise CheckpointError(
                f"The LoRA `{lora.path}` changes {list_keys(replaced)}, and the adapter `{adapter.name}` replaces them",
                hint="leave out --lora, or use an adapter's file without these tensors",
            )
    return merged_source(llama, loras), loras


def with_loras(model: LoadedModel, loras: Sequence[LoraFolder], *, base: str) -> LoadedModel:
    """The model with what is merged into it, and notes on LoRA folders for another LLaMA or chat template."""
    if not loras:
        return model
    files = [SourceFile(role="lora", path=path, sha256=file_digest(path)) for lora in loras for path in lora.files]
    told = [model.digest, *((Path(file.path).name, file.sha256) for file in files), *(lora.weight for lora in loras)]
    return dataclasses.replace(
        model,
        digest=hashlib.sha256(repr(told).encode()).hexdigest(),
        sources=(*model.sources, *files),
        merged=(*model.merged, *(lora.label for lora in loras)),
        notes=(*model.notes, *lora_notes(loras, base=base, tokenizer=model.tokenizer)),
    )


def lora_notes(loras: Sequence[LoraFolder], *, base: str, tokenizer: Tokenizer | None) -> list[str]:
    """Notes on LoRA folders for another LLaMA than `base`, or with another chat template than that of `tokenizer`."""
    trained_on = [str(lora.config.entries["base_model_name_or_path"]).replace("\\", "/").rstrip("/") for lora in loras]
    return [
        f"the LoRA `{lora.path}` was trained on `{shown_excerpt(other)}`, and is merged into `{shown_name(base)}`"
        for lora, other in zip(loras, trained_on, strict=True)
        if other and other.rpartition("/")[2].casefold() != base.casefold()
    ] + [
        f"the chat template in the LoRA `{lora.path}` is not that of the model, and is not used"
        for lora in loras
        if tokenizer is not None and find_template(lora.path) not in (None, tokenizer.settings.chat_template)
    ]


def merged_with(adapter: AdapterFile, contained: tuple[str, ...]) -> tuple[str, ...]:
    """Labels of what a LLaMA's weights contain, and then those of an adapter that are not among them."""
    labels = ("scales",) if adapter.is_chat else ("gates", "lora") if adapter.has_lora else ("gates",)
    return contained + tuple(label for label in labels if label not in contained)


def require_encoder(model: LoadedModel) -> None:
    """Raise CheckpointError for a model for texts, which has no picture encoder."""
    if not model.vision_state:
        raise CheckpointError(
            f"`{model.name}` is a model for texts, without a picture encoder", hint="name a model that sees pictures"
        )


def query_heads(
    spec: CaptionerSpec | EncoderSources,
    adapter: AdapterFile,
    *,
    exported: bool = False,
    encoder: EncoderCard | None = None,
) -> int | None:
    """Number of heads of the visual blocks; None means that it follows from their width.

    An exported encoder computes the visual blocks itself, so an unknown number does not matter there.
    """
    declared = adapter.declares.get("visual_heads")  # only in files of this program's `train`
    stated = declared if spec.visual_heads is None and type(declared) is int else spec.visual_heads
    if stated is not None:
        return stated
    if encoder is not None:
        return encoder.vision.query.num_heads
    return KNOWN_VISUAL_HEADS.get(adapter.visual["visual_query.weight"].shape[1], 1) if exported else None


def declared_template(adapter: AdapterFile) -> Template:
    """The template of prompts that an adapter was trained with; files of `train` declare it.

    Raises CheckpointError for an unknown one.
    """
    declared: Template = adapter.declares.get(TEMPLATE_KEY, "conversation" if adapter.is_chat else "instruction")
    if declared not in get_args(Template):
        raise CheckpointError(
            f"The config in `{adapter.name}` has {shown_excerpt(repr(declared))} as `{TEMPLATE_KEY}`, which is none of "
            f"{', '.join(get_args(Template))}",
            hint="a newer release has written it: install that, or train the adapter again",
        )
    return declared


def declared_questions(adapter: AdapterFile) -> StoredQuestions:
    """The questions that the adapter's file declares; only files written by `train` declare them.

    Raises CheckpointError for values that are no questions.
    """
    declared = {name: adapter.declares[key] for name, key in QUESTION_KEYS.items() if key in adapter.declares}
    for name, value in declared.items():
        if not is_question(value):
            raise CheckpointError(
                f"The config in `{adapter.name}` has {shown_excerpt(repr(value))} as `{QUESTION_KEYS[name]}`, where a "
                "question is wanted",
                hint="the file was changed after `train` wrote it: take it from a copy, or train it again",
            )
    return StoredQuestions(**declared)


def read_encoder(sources: EncoderSources) -> LoadedEncoder:
    """The picture encoder of an adapter in float32. No LLaMA is needed.

    CLIP is the one in the adapter's file, the one at `clip`, or OpenAI's file in its usual places: next to the adapter,
    in the current folder, in ~/.cache/clip. Raises CheckpointError if a file is missing, damaged or does not fit.
    """
    assert sources.adapter is not None, "the caller asks"
    adapter, clip = open_adapter(sources.adapter), sources.clip
    order, _ = resolve_channel_order(sources.channel_order, adapter)
    config, state = build_vision(
        adapter.visual,
        name=adapter.name,
        clip=find_clip(_usual_clip(adapter) if clip is None and not adapter.clip else clip, adapter),
        visual_heads=query_heads(sources, adapter),
        channel_order=order,
    )
    return LoadedEncoder(name=adapter_name(adapter.name), config=config, state=state)


def _usual_clip(adapter: AdapterFile) -> Path:
    """OpenAI's CLIP file in its usual places. Raises CheckpointError if there is none."""
    folders = (Path(adapter.name).parent, Path(), CLIP_CACHE.expanduser())
    places = list(dict.fromkeys(folder.resolve() / CLIP_FILE for folder in folders))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise CheckpointError(
            f"The adapter `{adapter.name}` holds no CLIP, and none was given",
            hint=f"name the file as --clip; searched were {', '.join(f'`{place}`' for place in places)}",
        )
    return found


def open_llama(place: LlamaFolder) -> LlamaSource:
    """Open a LLaMA folder. Raises the CheckpointError of its reader."""
    opened: LlamaSource = _OPENERS[place.form](place.folder)
    return opened


def open_llama_parts(
    place: LlamaFolder, *, adapter: AdapterFile | None, clip: str | os.PathLike[str] | None = None
) -> LlamaParts:
    """Open what is in a found LLaMA folder, and the CLIP of an adapter that sees pictures.

    A folder that is replaced meanwhile is read again. Raises CheckpointError as the readers do.
    """

    @again_if_replaced
    def read(_folder: str | os.PathLike[str]) -> LlamaParts:
        tokenizer = place.open_tokenizer()
        llama = open_llama(place)
        if adapter is None or not adapter.sees_pictures:
            return LlamaParts(tokenizer, llama, None)
        return LlamaParts(tokenizer, llama, find_clip(clip, adapter, llama=place))

    return read(place.folder)


def open_clip(path: str | os.PathLike[str]) -> ClipSource:
    """Open a picture tower: OpenAI's CLIP (TorchScript archive or state dict), a file or folder of Hugging Face or
    open_clip, or the tower of a bundle. Configs in the same folder are read.

    Raises CheckpointError for a file that cannot be read or is no tower that is known.
    """
    if (Path(path) / MANIFEST).is_file():
        if (found := open_bundle_clip(path)) is None:
            raise CheckpointError(f"The bundle `{path}` is for texts, and holds no CLIP", hint="name a file as --clip")
        return found
    files = clip_files(path)
    tensors = {key: one for file in files for key, one in read_tensor_file(file, torchscript=True).tensors.items()}
    # A single file with OpenAI's names may lie beside the config of anything.
    has_visual = any(key.startswith("visual.") for key in tensors)
    beside = configs_beside(files[0], has_visual=has_visual, are_needed=Path(path).is_dir() or not has_visual)
    return read_clip(tensors, name=str(files[0]), **beside)


def adapter_clip(adapter: AdapterFile) -> ClipSource:
    """The tower in an adapter's file. Raises CheckpointError."""
    config = adapter.declares.get(TOWER_KEY)  # only files of `train` with other towers than OpenAI's have it
    return read_clip(adapter.clip, name=adapter.name, config=config if isinstance(config, dict) else None)


def find_clip(
    path: str | os.PathLike[str] | None, adapter: AdapterFile, *, llama: LlamaFolder | None = None
) -> ClipSource | None:
    """The CLIP inside the adapter's file, if there is one; else the file at `path`; else the CLIP of the bundle."""
    if adapter.clip:
        return adapter_clip(adapter)
    if path is None:
        return open_bundle_clip(llama.folder) if llama is not None and llama.form == "bundle" else None
    return open_clip(path)


def resolve_channel_order(wanted: WantedOrder, adapter: AdapterFile) -> tuple[ChannelOrder, str | None]:
    """The channel order: as wanted, as the file declares, or by release; and the file's digest if it was computed."""
    if wanted != "auto":
        return wanted, None
    declared = adapter.declares.get("channel_order")  # only in files written by `train`
    if declared in ("rgb", "bgr"):
        return declared, None
    digest = claimed_digest(adapter.name)
    computed = None
    if digest is None and adapter.dim == _RELEASED_WIDTH and adapter.declares:
        digest = computed = file_digest(adapter.name)
    return ("bgr" if digest in RELEASED_ADAPTERS else "rgb"), computed


def claimed_digest(path: str | os.PathLike[str]) -> str | None:
    """The SHA-256 in the file name of an adapter release; None if there is none."""
    match = re.match(r"([0-9a-f]{64})_", Path(path).name)
    return match[1] if match else None


def adapter_name(path: str | os.PathLike[str]) -> str:
    """An adapter's name for display: its file name without digest and suffix."""
    return shown_name(re.sub(r"^[0-9a-f]{64}_", "", Path(path).name).removesuffix(".pth") or Path(path).name)


def digest_of(files: Sequence[SourceFile], vision: VisionConfig, decoder: DecoderConfig) -> str:
    """Identifies the model without reading 13 GB: if a file changes, its size or time changes."""
    stats = [(file.role, os.path.basename(file.path), os.stat(file.path)) for file in files]
    parts = {
        "files": [(role, name, stat.st_size, stat.st_mtime_ns) for role, name, stat in stats],
        "vision": vision.to_dict(),
        "llm": decoder.to_dict(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
