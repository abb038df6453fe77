"""Hugging Face transformers: LLaMA with two kinds of cache, and CLIP's picture tower."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.vision.config import ClipConfig
from llama_adapter.vision.pixels import PIXEL_MEAN, PIXEL_STD
from scripts.peers.packages import require
from scripts.peers.weights import huggingface_decoder, huggingface_tower

PACKAGES = ("transformers",)
CacheKind = Literal["dynamic", "static", "compiled"]  # the last one is static


def llama_config(config: DecoderConfig, *, dtype: torch.dtype, **options: Any) -> Any:
    """The `LlamaConfig` of a decoder; `options` are further settings. Raises MissingPackage."""
    return require("transformers", package="transformers").LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.context,
        tie_word_embeddings=False,
        dtype=dtype,
        **options,
    )


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled as the documentation has it, for each shape. Programs of earlier models are dropped."""
    torch.compiler.reset()  # torch limits the programs of a function
    compiled: Callable[..., Any] = torch.compile(forward, mode="reduce-overhead", dynamic=False)
    return compiled


def check_graphs() -> None:
    """Raise RuntimeError if compiled programs of this process run without CUDA graphs, which torch only logs."""
    from torch._dynamo.utils import counters

    if skips := counters["inductor"]["cudagraph_skips"]:
        raise RuntimeError(f"torch.compile used no CUDA graphs for {skips} programs; its figures are without them")


class HuggingFaceDecoder:
    """`LlamaForCausalLM`, called as `generate` calls it, without what `generate` does between steps.

    With a compiled cache, steps are compiled, and prefills are not.
    """

    def __init__(
        self, state: Mapping[str, Tensor], config: DecoderConfig, *, dtype: torch.dtype, cache: CacheKind
    ) -> None:
        transformers = require("transformers", package="transformers")
        self._transformers, self._cache_kind, self._context = transformers, cache, config.context
        self._device = state["head.weight"].device
        # Compiled programs write to the cache, which they cannot do with tensors of the inference mode.
        self._without_gradients = torch.no_grad if cache == "compiled" else torch.inference_mode
        settings = llama_config(config, dtype=dtype)
        with torch.device("meta"):
            self._model = transformers.LlamaForCausalLM(settings)
        named = {name: tensor.to(dtype) for name, tensor in huggingface_decoder(state, config).items()}
        self._model.load_state_dict(named, assign=True)
        inner = self._model.model
        # Its table is no weight, so it was a sketch.
        inner.rotary_emb = type(inner.rotary_emb)(settings).to(self._device)
        self._model.eval().requires_grad_(False)
        self._forward: Callable[..., Any] = self._model.forward
        self._step = _compiled(self._forward) if cache == "compiled" else self._forward
        # The argument's name differs between releases.
        names = inspect.signature(self._forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._cache: Any = None
        self._kept: dict[int, Any] = {}  # by rows: compiled steps belong to one cache
        self._num_tokens = 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        with self._without_gradients():
            self._cache, self._num_tokens = self._empty_cache(len(prompts)), len(prompts[0])
            return self._run(self._forward, torch.tensor(prompts), start=0)

    def spread(self, num_rows: int) -> None:
        with self._without_gradients():
            if self._cache_kind == "dynamic":
                self._cache.batch_repeat_interleave(num_rows)
                return
            layers = [(layer.keys, layer.values) for layer in self._cache.layers]
            used = [[part[:, :, : self._num_tokens].repeat(num_rows, 1, 1, 1) for part in parts] for parts in layers]
            self._cache = self._empty_cache(num_rows)
            for index, (keys, values) in enumerate(used):
                self._cache.update(keys, values, index)

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        with self._without_gradients():
            if self._cache_kind == "compiled":
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return self._run(self._step, torch.tensor(token_ids)[:, None], start=position)

    def _run(self, forward: Callable[..., Any], tokens_BS: Tensor, *, start: int) -> list[int]:
        answer = forward(
            input_ids=tokens_BS.to(self._device),
            position_ids=torch.arange(start, start + tokens_BS.shape[1], device=self._device)[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        ids: list[int] = answer.logits[:, -1].argmax(dim=-1).tolist()
        return ids

    def _empty_cache(self, num_rows: int) -> Any:
        if self._cache_kind == "dynamic":
            return self._transformers.DynamicCache()
        if (kept := self._kept.get(num_rows)) is not None:
            kept.reset()
            return kept
        empty = self._transformers.StaticCache(config=self._model.config, max_cache_len=self._context)
        if self._cache_kind == "compiled":
            self._kept[num_rows] = empty
        return empty


class HuggingFaceVision:
    """`CLIPVisionModel` on normalised pixels; gives its last hidden states for all tokens."""

    def __init__(
        self, state: Mapping[str, Tensor], config: ClipConfig, *, dtype: torch.dtype, is_compiled: bool = False
    ) -> None:
        transformers = require("transformers", package="transformers")
        settings = transformers.CLIPVisionConfig(
            hidden_size=config.width,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            image_size=config.image_size,
            patch_size=config.patch_size,
            projection_dim=config.output_dim,
            dtype=dtype,
        )
        with torch.device("meta"):
            self._model = transformers.CLIPVisionModel(settings)
        device = next(iter(state.values())).device
        named = huggingface_tower(state, num_layers=config.num_layers)
        # The attribute name of the inner tower differs between releases.
        prefix = next(iter(self._model.state_dict())).partition("embeddings.")[0]
        self._model.load_state_dict({prefix + name: tensor.to(dtype) for name, tensor in named.items()}, assign=True)
        for module in self._model.modules():
            if "position_ids" in dict(module.named_buffers(recurse=False)):
                module.position_ids = torch.arange(config.num_patches + 1, device=device)[None]
        self._model.eval().requires_grad_(False)
        self._run: Callable[..., Any] = _compiled(self._model) if is_compiled else self._model
        self._dtype, self._device = dtype, device
        self._mean_C11, self._std_C11 = (
            torch.tensor(values, device=device).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD)
        )

    @torch.inference_mode()
    def encode(self, pixels_BHWC: NDArray[np.uint8]) -> Tensor:
        pixels_BCHW = torch.from_numpy(pixels_BHWC).to(self._device).permute(0, 3, 1, 2).float()
        normalised_BCHW = (pixels_BCHW / 255.0 - self._mean_C11) / self._std_C11
        hidden_BTW: Tensor = self._run(pixel_values=normalised_BCHW.to(self._dtype)).last_hidden_state
        return hidden_BTW
