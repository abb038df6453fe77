"""Hugging Face transformers: LLaMA with two kinds of cache, and CLIP's picture tower."""

from collections.abc import Mapping, Sequence
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
CacheKind = Literal["dynamic", "static"]


def llama_config(config: DecoderConfig, *, dtype: torch.dtype, **options: Any) -> Any:
    """The `LlamaConfig` of a decoder; `options` are further settings. Raises MissingPackage."""
    return require("transformers", package="transformers").LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.context,
        tie_word_embeddings=False,
        dtype=dtype,
        **options,
    )


class HuggingFaceDecoder:
    """`LlamaForCausalLM`, called as `generate` calls it, without what `generate` does between steps."""

    def __init__(
        self, state: Mapping[str, Tensor], config: DecoderConfig, *, dtype: torch.dtype, cache: CacheKind
    ) -> None:
        transformers = require("transformers", package="transformers")
        self._transformers, self._cache_kind, self._context = transformers, cache, config.context
        settings = llama_config(config, dtype=dtype)
        with torch.device("meta"):
            self._model = transformers.LlamaForCausalLM(settings)
        self._model.load_state_dict(huggingface_decoder(state, config, dtype=dtype), assign=True)
        inner = self._model.model
        inner.rotary_emb = type(inner.rotary_emb)(settings)  # its table is no weight, so it was a sketch
        self._model.eval().requires_grad_(False)
        self._cache: Any = None
        self._num_tokens = 0

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self._cache, self._num_tokens = self._empty_cache(), len(prompts[0])
        return self._run(torch.tensor(prompts), start=0)

    @torch.inference_mode()
    def spread(self, num_rows: int) -> None:
        if self._cache_kind == "dynamic":
            self._cache.batch_repeat_interleave(num_rows)
            return
        wider = self._empty_cache()
        for index, layer in enumerate(self._cache.layers):
            used = (layer.keys[:, :, : self._num_tokens], layer.values[:, :, : self._num_tokens])
            wider.update(*(part.repeat(num_rows, 1, 1, 1) for part in used), index)
        self._cache = wider

    @torch.inference_mode()
    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        return self._run(torch.tensor(token_ids)[:, None], start=position)

    def _run(self, tokens_BS: Tensor, *, start: int) -> list[int]:
        positions_1S = torch.arange(start, start + tokens_BS.shape[1])[None]
        answer = self._model.forward(
            input_ids=tokens_BS,
            position_ids=positions_1S,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        ids: list[int] = answer.logits[:, -1].argmax(dim=-1).tolist()
        return ids

    def _empty_cache(self) -> Any:
        if self._cache_kind == "dynamic":
            return self._transformers.DynamicCache()
        return self._transformers.StaticCache(config=self._model.config, max_cache_len=self._context)


class HuggingFaceVision:
    """`CLIPVisionModel` on normalised pixels; gives its last hidden states for all tokens."""

    def __init__(self, state: Mapping[str, Tensor], config: ClipConfig, *, dtype: torch.dtype) -> None:
        transformers = require("transformers", package="transformers")
        settings = transformers.CLIPVisionConfig(
            hidden_size=config.width,
            intermediate_size=4 * config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            image_size=config.image_size,
            patch_size=config.patch_size,
            projection_dim=config.output_dim,
            dtype=dtype,
        )
        with torch.device("meta"):
            self._model = transformers.CLIPVisionModel(settings)
        named = huggingface_tower(state, num_layers=config.num_layers, dtype=dtype)
        # The attribute name of the inner tower differs between releases.
        prefix = next(iter(self._model.state_dict())).partition("embeddings.")[0]
        self._model.load_state_dict({prefix + name: tensor for name, tensor in named.items()}, assign=True)
        for module in self._model.modules():
            if "position_ids" in dict(module.named_buffers(recurse=False)):
                module.position_ids = torch.arange(config.num_patches + 1)[None]
        self._model.eval().requires_grad_(False)
        self._dtype = dtype
        self._mean_C11, self._std_C11 = (torch.tensor(values).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))

    @torch.inference_mode()
    def encode(self, pixels_BHWC: NDArray[np.uint8]) -> Tensor:
        pixels_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).float()
        normalised_BCHW = (pixels_BCHW / 255.0 - self._mean_C11) / self._std_C11
        hidden_BTW: Tensor = self._model(pixel_values=normalised_BCHW.to(self._dtype)).last_hidden_state
        return hidden_BTW
