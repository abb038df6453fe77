"""The random weights that every engine computes with, in our form and under the names and layouts of other programs."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.random_model import (
    LLAMA_SIZES,
    NUM_QUERIES,
    WiderTokenizer,
    decoder_config,
    parse_size,
    random_tensors,
    vision_config,
)
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.weights.names import meta_tensors, to_huggingface
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.state import convert_precision, new_finer_weights
from llama_adapter.vision.backends.kernels import KernelQueries
from llama_adapter.vision.config import VIT_L_14, ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, VisualQueryBlocks
from llama_adapter.vision.tensor_names import LAYOUTS
from scripts.peers.sizes import CONTEXT

# Towers besides those of app/models/random_model.py, with the sizes of their published configs.
_TOWERS = {
    "ViT-B/32": ClipConfig(patch_size=32, width=768, num_layers=12, num_heads=12, output_dim=512),
    "ViT-L/14@336": dataclasses.replace(VIT_L_14, image_size=336),
    "SigLIP-base": ClipConfig(
        patch_size=16,
        width=768,
        num_layers=12,
        num_heads=12,
        output_dim=768,
        activation="gelu_tanh",
        norm_eps=1e-6,
        num_class_tokens=0,
        has_patch_bias=True,
        has_pre_norm=False,
        has_projection=False,
    ),
}


def decoder_sizes(size: str) -> DecoderConfig:
    """The decoder of a size in app/models/random_model.py, with `CONTEXT` positions."""
    return decoder_config(parse_size(size), context=CONTEXT)


def encoder_sizes(encoder: str, *, output_dim: int) -> VisionConfig:
    """The encoder with this name, for a language model of width `output_dim`.

    The visual blocks are those of app/models/random_model.py, or for `embedded` those of the embedded model.
    """
    if encoder == "embedded":
        config = VisionConfig.from_dict(read_manifest(embedded_model())["vision"])
    else:
        config = vision_config(LLAMA_SIZES["tiny" if encoder == "vit-tiny" else "7B"])
        config = dataclasses.replace(config, clip=_TOWERS.get(encoder, config.clip))
    return dataclasses.replace(config, query=dataclasses.replace(config.query, output_dim=output_dim))


def bare_tower(encoder: str) -> VisionConfig:
    """The CLIP tower with this name, without visual blocks, for comparison with other encoders.

    After `give_all_tokens` its output is that of the tower.
    """
    config = encoder_sizes(encoder, output_dim=64)
    query = QueryConfig(
        num_queries=NUM_QUERIES, width=config.clip.output_dim, depth=0, num_heads=2, mlp_dim=64, output_dim=64
    )
    return dataclasses.replace(config, query=query)


def give_all_tokens() -> None:
    """Make all encoders of this process give the tower's features (B, 1 + patches, C) in place of the visual query.

    A visual query without visual blocks would be the same for every picture.
    """
    VisualQueryBlocks.forward = lambda self, features_BTC: features_BTC  # type: ignore[method-assign]
    KernelQueries.__call__ = lambda self, features_BTC: features_BTC  # type: ignore[method-assign]


def decoder_state(
    config: DecoderConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Weights with open gates; with greedy decoding they never produce the end token."""
    with torch.device("meta"):
        sketch = LlamaAdapterDecoder(config).state_dict()
    return dict(random_tensors(sketch, dtype=dtype, device=device, eos_id=WiderTokenizer(config.vocab_size).eos_id))


def encoder_state(
    config: VisionConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Weights of a `PictureEncoder`."""
    with torch.device("meta"):
        sketch = PictureEncoder(config).state_dict()
    return dict(random_tensors(sketch, dtype=dtype, device=device))


def random_weights(
    decoder: DecoderConfig,
    vision: VisionConfig,
    *,
    dtype: torch.dtype,
    precision: Precision,
    device: torch.device | None = None,
) -> LoadedModel:
    """A model of these sizes. bfloat16 and int8 weights are rounded from the float32 ones.

    On another device than the CPU, float weights are drawn in `dtype`, as for the other programs there.
    """
    with torch.device("meta"):
        decoder_sketch, vision_sketch = LlamaAdapterDecoder(decoder), PictureEncoder(vision)
    drawn_in = torch.float32 if device is None or precision != "float" else dtype
    drawn = decoder_state(decoder, dtype=drawn_in, device=device)
    encoder = encoder_state(vision, dtype=drawn_in, device=device)
    return LoadedModel(
        name="random",
        digest="random",
        vision_config=vision,
        vision_state=convert_precision(encoder, vision_sketch, dtype=dtype, wanted=precision),
        decoder_config=decoder,
        decoder_state=convert_precision(drawn, decoder_sketch, dtype=dtype, wanted=precision),
        tokenizer=WiderTokenizer(decoder.vocab_size),
        dtype=dtype,
        sources=(),
        merged=("gates",),
        precision=precision,
        finer_weights=new_finer_weights(decoder_sketch, precision),
    )


def huggingface_decoder(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The state dict of `LlamaForCausalLM`; its query and key rows are half-split like ours.

    The adapter's tensors are left out, and biases too: in random weights they are 0.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith("adapter.") and not name.endswith(".bias"):
            parts = meta_tensors(name, tensor, config).items()
            named |= {to_huggingface(part, norms=config.norms): rows for part, rows in parts}
    return named


def huggingface_tower(state: Mapping[str, Tensor], *, num_layers: int) -> dict[str, Tensor]:
    """The state dict of `CLIPVisionModel` without the common prefix of its names; it has no projection."""
    named: dict[str, Tensor] = {}
    for ours, names in LAYOUTS["clip"].names(num_layers).items():
        if not ours.startswith("projection"):
            named |= zip(names, state[f"clip.{ours}"].chunk(len(names)), strict=True)
    return named
