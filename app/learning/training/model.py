"""The model in training: trained parameters over frozen weights, the loss, and the tensors for an adapter's file.

It implements LLaMA-Adapter (Zhang et al., 2023) and LLaMA-Adapter V2 (Gao et al., 2023).
"""

# B rows, S tokens, T tokens of CLIP, C width of its features, Q queries, D model width, A adapter layers

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llama_adapter.app.learning.training.job import TrainingChoice
from llama_adapter.app.learning.training.sources import NEW_ADAPTER, TrainingSources, open_sources
from llama_adapter.app.models import checkpoints
from llama_adapter.app.models.bundle_manifest import check_halves, is_question, no_vision
from llama_adapter.app.models.checkpoints import LoadedModel, StreamedModel, merged_with
from llama_adapter.app.models.number_formats import Dtype, dtype_of
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.training.build import DECODER_KINDS, build_decoder, kind_of, llama_tensors
from llama_adapter.llm.training.decoder import SoftLabels, TrainableDecoder
from llama_adapter.llm.weights.adapter import AdapterFile, adapter_of
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state, use_training_forms
from llama_adapter.vision.pixels import zero_picture
from llama_adapter.vision.towers import clip_tensors
from llama_adapter.vision.weights import build_vision, visual_tensors

_VISUAL, _TOWER = "visual blocks", "picture tower"
_CLIP = "clip."  # prefix of the picture tower's names, here and in an adapter's file
# Released files have these tensors in float16. Tensors of the file that a training starts from keep their dtype.
_HALF = (".gate", ".new_gate", "_l1.weight", "_l2.weight")


def open_trainable(
    spec: CaptionerSpec,
    choice: TrainingChoice,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    kernels: Library | None = None,
) -> "TrainableModel":
    """The model of `spec` on `device`, in which the parameters of `choice` are trained.

    Frozen weights are in `dtype`, trained weights in float32. Before the first step it computes what the model of
    `spec` computes. `seed` initialises new parameters. With `kernels`, the C kernels compute the products with the
    decoder's frozen weights, otherwise torch does. Raises CheckpointError, and UsageError for a model in which the
    parameters of `choice` cannot be trained.
    """
    sources = open_sources(spec, choice, seed=seed)
    if not sources.adapter.sees_pictures and choice.kinds - {"queries", "gates"}:
        raise UsageError(
            "An adapter for texts has adaption prompts and gates only, but the sets to train are "
            f"{', '.join(choice.known_sets)}",
            hint="train `adapter`, or name a CLIP as --clip for an adapter that sees pictures",
        )
    if sources.adapter.name == NEW_ADAPTER and "gates" not in choice.kinds:
        raise UsageError(
            f"The gates of a new adapter are closed and {', '.join(choice.known_sets)} does not train them, so "
            "pictures would have no effect",
            hint="train `bias` or `adapter` too",
        )
    return TrainableModel(sources, choice, dtype=dtype, device=torch.device(device), seed=seed, kernels=kernels)


class TrainableModel(nn.Module):
    """A model whose frozen weights have one dtype (`dtype`) and whose trained weights are float32.

    `tokenizer`, `decoder_config` and `vision_config` are those of the model.
    """

    def __init__(
        self,
        sources: TrainingSources,
        choice: TrainingChoice,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        kernels: Library | None = None,
    ) -> None:
        """Made by `open_trainable`."""
        super().__init__()
        self.sources, self.choice = sources, choice
        self.is_eye_trained = False  # see `freeze_vision`
        self.questions = sources.questions  # a run replaces them by those that it learned
        self.tokenizer: Tokenizer = sources.tokenizer
        adapter, vocab_size = sources.adapter, sources.tokenizer.vocab_size
        planned = plan_decoder(sources.llama, adapter, vocab_size=vocab_size, context=sources.context)
        self.decoder_config: DecoderConfig = dataclasses.replace(planned, separate_adapter_kv=False)
        self.decoder: TrainableDecoder = build_decoder(
            planned,
            source=sources.llama,
            adapter=adapter,
            trained=[kind for kind in DECODER_KINDS if kind in choice.kinds],
            lora_rank=choice.lora_rank,
            dtype=dtype,
            device=device,
            seed=seed,
            kernels=kernels,
        )
        self.vision: PictureEncoder | None = None
        self.vision_config: VisionConfig = no_vision(planned)
        if adapter.sees_pictures:
            self.vision_config, state = _vision(sources, adapter, dtype=dtype)
            check_halves(self.vision_config, planned, adapter=adapter.name)
            trained = {"query": _VISUAL in choice.kinds, "clip": _TOWER in choice.kinds}
            state |= {name: value.float().clone() for name, value in state.items() if trained[name.partition(".")[0]]}
            self.vision = encoder_from_state(self.vision_config, {k: v.to(device) for k, v in state.items()})
            self.vision.mean, self.vision.std = self.vision.mean.to(device), self.vision.std.to(device)
            for part, is_trained in trained.items():
                module = self.vision.get_submodule(part).requires_grad_(is_trained)
                if is_trained and device.type == "cpu":
                    use_training_forms(module)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages to the user about the model that the training starts from."""
        notes = self.sources.notes
        rank = _rank(self.sources.adapter)
        if "lora" in self.choice.known_sets and rank not in (0, self.choice.lora_rank):
            notes += (f"the LoRA factors of `{self.sources.adapter.name}` have rank {rank}, and keep it",)
        return notes

    @property
    def encodes(self) -> Literal["pixels", "features", "visual_query", "nothing"]:
        """What `encode` returns: what the first trained part of the encoder reads, or the visual query.

        These are pixels if the picture tower is trained, and CLIP's features if only the visual blocks are. "nothing"
        for an adapter for texts.
        """
        if self.vision is None:
            return "nothing"
        if self.is_eye_trained:
            return "visual_query"
        if _TOWER in self.choice.kinds:
            return "pixels"
        return "features" if _VISUAL in self.choice.kinds else "visual_query"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of frozen weights and activations."""
        return self.decoder.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.decoder.device

    def release(self) -> None:
        """Free the memory of all weights; afterwards the model cannot compute."""
        self.to("meta")
        self.decoder.release()

    @functools.cached_property
    def encoder_digest(self) -> str:
        """SHA-256 over the frozen weights, dtype and sizes that `encode` uses."""
        state = {} if self.vision is None or self.encodes == "pixels" else self.vision.state_dict()
        if self.encodes != "visual_query":
            state = {name: tensor for name, tensor in state.items() if not name.startswith("query.")}
        return _digest([self.encodes, str(self.dtype), self.vision_config.to_dict()], state)

    @functools.cached_property
    def start_digest(self) -> str:
        """SHA-256 over what the training starts from: the encoder, the adapter and the first layer of the LLaMA."""
        first = {name: one.read() for name, one in self.sources.llama.tensors.items() if name.startswith("layers.0.")}
        return _digest(self.encoder_digest, first | _file_tensors(self.sources.adapter))

    @torch.no_grad()
    def encode(self, pixels_BHWC: Tensor) -> Tensor:
        """RGB pixels uint8 (B, S, S, 3) -> CLIP's features (B, T, C) or the visual query (B, Q, D), see `encodes`.

        The result has no gradients, and has the dtype and device of the frozen weights. Pixels stay as they are.
        """
        assert self.vision is not None, "an adapter for texts encodes no pictures"
        if self.encodes == "pixels":
            return pixels_BHWC.round().to(torch.uint8)
        pixels_BHWC = pixels_BHWC.to(self.device)
        compute = self.vision.features if self.encodes == "features" else self.vision
        encoded: Tensor = compute(pixels_BHWC)
        return encoded

    def encode_nothing(self) -> Tensor:
        """The encoding of a picture that is zero after normalisation, which examples without a picture attend to.

        Shape and dtype are those of `encode` for one picture.
        """
        rule, order = self.vision_config.clip.pixels, self.vision_config.channel_order
        return self.encode(torch.from_numpy(zero_picture(rule, channel_order=order).copy())[None])

    def forward(
        self, tokens_BS: Tensor, labels_BS: Tensor, encoded: Tensor | None, soft: SoftLabels | None = None
    ) -> tuple[Tensor, Tensor]:
        """The float32 sum of the loss over all labels, and the sums for each row, (B).

        `tokens_BS` and `labels_BS` are int64, padded with 0 after the tokens. Logits at position t are compared with
        labels at t + 1; `IGNORED` labels have no loss. `encoded` is the result of `encode`, with a row for each row of
        tokens or one row for all; None for an adapter for texts. `soft` is what is learned in place of the labels.
        """
        loss, loss_B = self.decoder(tokens_BS, labels_BS, self.visual_query(encoded), soft)
        return loss, loss_B

    def visual_query(self, encoded: Tensor | None) -> Tensor:
        """Result of `encode` -> visual query (B, Q, D), zeros for an adapter for texts."""
        config = self.decoder_config
        if self.vision is None:
            return torch.zeros(1, config.num_queries, config.dim, dtype=self.dtype, device=self.device)
        assert encoded is not None, "a model that sees pictures encodes `encode_nothing()` for texts"
        if self.encodes == "pixels":
            pixels_BCSS = self.vision.normalise(encoded.to(self.device)).to(self.dtype)
            encoded = in_dtype_of(pixels_BCSS, self.vision.clip)
        encoded = encoded.to(self.device, self.dtype)
        if self.encodes == "visual_query":
            return encoded
        return in_dtype_of(encoded, self.vision.query)

    def freeze_vision(self) -> None:
        """Train the encoder no further. Its weights are still part of the adapter's file."""
        assert self.vision is not None, "the model sees pictures"
        self.vision.requires_grad_(False)
        self.is_eye_trained = True

    def trained(self) -> dict[str, nn.Parameter]:
        """Name -> parameter that requires gradients. The names are stable: checkpoints use them."""
        named = dict(self.decoder.decoder.named_parameters())
        if self.vision is not None:
            named |= {f"visual.{name}": one for name, one in self.vision.query.named_parameters()}
            named |= {f"{_CLIP}{name}": one for name, one in self.vision.clip.named_parameters()}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def no_decay(self) -> set[str]:
        """Names in `trained` without weight decay: norms, biases, gates and queries."""
        return {
            name
            for name, weight in self.trained().items()
            if weight.ndim < 2 or name.endswith(("queries", "gate", "position_embedding"))
        }

    def counts(self) -> dict[str, int]:
        """Kind -> number of trained scalars, with those of an encoder that was trained before."""
        counted: Counter[str] = Counter()
        for name, weight in self.trained().items():
            counted[self.kind_of(name)] += weight.numel()
        if self.is_eye_trained and self.vision is not None:
            for kind, part in ((_VISUAL, self.vision.query), (_TOWER, self.vision.clip)):
                counted[kind] += sum(weight.numel() for weight in part.parameters())
        return dict(counted)

    def kind_of(self, name: str) -> str:
        """The kind of a parameter of `trained`."""
        if name.startswith(_CLIP):
            return _TOWER
        return _VISUAL if name.startswith("visual.") else str(kind_of(name))

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The tensors of the adapter's file: on the CPU, with the names, shapes and dtypes of the released adapters.

        Tensors that are not trained are those that the training started from. An adapter for texts has the format of
        LLaMA-Adapter V1.
        """
        sources, kinds = self.sources, self.choice.kinds
        found = _file_tensors(sources.adapter)
        prefix = "llama." if sources.adapter.sees_pictures else ""
        for name, tensor in llama_tensors(self.decoder):
            kind, key = kind_of(name), prefix + name
            if kind in kinds or (key not in found and kind in ("gates", "LoRA factors")):
                found[key] = _as_in_file(name, tensor, found.get(key))
        if "queries" in kinds:
            queries = self.decoder.decoder.adapter.queries.detach().flatten(0, 1)
            found["adapter_query.weight"] = queries.to("cpu", sources.adapter.queries.dtype, copy=True)
        if self.vision is not None and _VISUAL in kinds:
            state = self.vision.query.state_dict()
            for name, tensor in visual_tensors(state, depth=self.vision_config.query.depth).items():
                found[name] = tensor.to("cpu", sources.adapter.visual[name].dtype, copy=True)
        if self.vision is not None and _TOWER in kinds:
            found = {name: tensor for name, tensor in found.items() if not name.startswith(_CLIP)}
            for name, tensor in clip_tensors(self.vision.clip.state_dict(), self.vision_config.clip)[0].items():
                found[f"{_CLIP}{name}"] = tensor.to("cpu", torch.float32, copy=True)
        if sources.has_adapter_file:
            return found
        return {name: tensor.to(_released_type(name)) for name, tensor in found.items()}

    def file_config(self) -> dict[str, Any]:
        """The `config` of the adapter's file, as in the released files.

        Entries are added that other programs do not read: number of heads of the visual blocks, channel order,
        questions, and the template of prompts.
        """
        adapter, kinds = self.sources.adapter, self.choice.kinds
        config: dict[str, Any] = {
            "w_bias": "biases" in kinds or any(name.endswith(".bias") for name in adapter.llama),
            "w_lora": "LoRA factors" in kinds or adapter.has_lora,
            "lora_rank": _rank(adapter) or self.choice.lora_rank,
        }
        if self.vision is not None:
            heads, order = self.vision_config.query.num_heads, self.vision_config.channel_order
            config |= {"visual_heads": heads, "channel_order": order}
            if tower := self._tower_config():
                config[checkpoints.TOWER_KEY] = tower
        if self.sources.template != "instruction":
            config[checkpoints.TEMPLATE_KEY] = self.sources.template
        asked = {key: getattr(self.questions, name) for name, key in checkpoints.QUESTION_KEYS.items()}
        return config | {key: text for key, text in asked.items() if is_question(text)}

    def _tower_config(self) -> dict[str, Any]:
        """The config of the tower in the adapter's file; empty if the file has none, or one of OpenAI's kind."""
        if self.vision is not None and _TOWER in self.choice.kinds:
            return clip_tensors(self.vision.clip.state_dict(), self.vision_config.clip)[1]
        return dict(self.sources.adapter.declares.get(checkpoints.TOWER_KEY, {}))

    def loaded_model(self, dtype: Dtype) -> StreamedModel:
        """The model with its present weights, in the form that loaders return.

        A captioner gives the same answers with it as with the written adapter. Weights are in `dtype`.
        """
        sources = self.sources
        tensors = self.adapter_tensors()
        adapter = adapter_of(
            tensors, name=sources.adapter.name, declares=self.file_config(), for_texts=self.vision is None
        )
        llama = sources.llama
        config = plan_decoder(llama, adapter, vocab_size=self.tokenizer.vocab_size, context=sources.context)
        encoder = () if self.vision is None else self.vision.state_dict().values()
        chosen = dtype_of(dtype, decoder=config, encoder=encoder)
        vision_config, vision_state = self.vision_config, dict[str, Tensor]()
        if self.vision is not None:
            vision_config, vision_state = _vision(sources, adapter, dtype=chosen)
        model = LoadedModel(
            name=sources.name,
            digest=_digest([config.to_dict(), vision_config.to_dict(), self.encoder_digest], tensors),
            vision_config=vision_config,
            vision_state=vision_state,
            decoder_config=config,
            decoder_state={},
            tokenizer=self.tokenizer,
            dtype=chosen,
            sources=sources.files,
            merged=merged_with(adapter, llama.merged),
            prompt=self.questions.prompt,
            question=self.questions.question,
            template=sources.template,
        )
        return model, decoder_tensors(config, source=llama, adapter=adapter, dtype=chosen)


def in_dtype_of(x: Tensor, module: nn.Module) -> Tensor:
    """The result of a module with float32 weights for `x`, computed in the dtype of `x`."""
    cast = {} if x.dtype == torch.float32 else {name: one.to(x.dtype) for name, one in module.named_parameters()}
    computed: Tensor = torch.func.functional_call(module, cast, (x,))
    return computed


def _vision(
    sources: TrainingSources, adapter: AdapterFile, *, dtype: torch.dtype
) -> tuple[VisionConfig, dict[str, Tensor]]:
    return build_vision(
        adapter.visual,
        name=adapter.name,
        clip=checkpoints.adapter_clip(adapter) if adapter.clip else sources.clip,
        visual_heads=sources.visual_heads,
        channel_order=sources.channel_order,
        dtype=dtype,
    )


def _file_tensors(adapter: AdapterFile) -> dict[str, Tensor]:
    """All tensors of an adapter's file, by their names in the file."""
    prefix = "llama." if adapter.sees_pictures else ""
    found = dict(adapter.visual)
    found |= {prefix + name: tensor for name, tensor in adapter.llama.items()}
    found |= {f"clip.{name}": tensor for name, tensor in adapter.clip.items()}
    return found | {"adapter_query.weight": adapter.queries}


def _as_in_file(name: str, tensor: Tensor, before: Tensor | None) -> Tensor:
    """A tensor in the shape and dtype of `before`, the tensor in the file; without it, in those of a released file."""
    if before is not None:
        return tensor.reshape(before.shape).to(before.dtype)
    if name.endswith(".gate"):
        tensor = tensor.reshape(1, -1, 1, 1)
    return tensor.to(_released_type(name))


def _released_type(name: str) -> torch.dtype:
    return torch.float16 if name.endswith(_HALF) else torch.float32


def _rank(adapter: AdapterFile) -> int:
    """The rank of the adapter's LoRA factors; 0 if it has none."""
    return next((len(factor) for name, factor in adapter.llama.items() if name.endswith("_l1.weight")), 0)


def _digest(values: Any, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over values and tensors, hexadecimal."""
    digest = hashlib.sha256(json.dumps(values).encode())
    for name in sorted(tensors):
        numbers = tensors[name].detach().cpu().contiguous().flatten()
        digest.update(name.encode() + numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
