"""The embedded model's sizes, and functions that build its parts for training. The training itself is in the stages."""

import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.vision.block import plain_attention
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, VisualQueryBlocks, use_attention

VOCABULARY = 1024
VISION = VisionConfig(
    clip=ClipConfig(image_size=224, patch_size=28, width=192, num_layers=4, num_heads=3, output_dim=192),
    query=QueryConfig(num_queries=10, width=192, depth=2, num_heads=6, mlp_dim=768, output_dim=192),
)
DECODER = DecoderConfig(
    vocab_size=VOCABULARY,
    dim=192,
    num_layers=4,
    num_heads=6,
    ffn_dim=512,
    norm_eps=1e-6,
    context=512,
    num_adapter_layers=3,
    num_queries=10,
)


def build_encoder() -> PictureEncoder:
    """The picture half with small random weights, set up for training on a CPU."""
    encoder = PictureEncoder(VISION)
    for name, weight in encoder.named_parameters():
        if weight.ndim == 2 and "embedding" not in name and not name.endswith("queries"):
            torch.nn.init.trunc_normal_(weight, std=0.04)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    assert isinstance(encoder.query, VisualQueryBlocks)
    torch.nn.init.normal_(encoder.query.queries, std=0.5)
    # On a CPU the backward pass of the fused kernel is slower.
    use_attention(encoder, plain_attention)
    return encoder


def build_decoder() -> LlamaAdapterDecoder:
    """The language half with small random weights; biases start at zero, and the biases of k and v stay zero."""
    decoder = LlamaAdapterDecoder(DECODER)
    for name, weight in decoder.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(weight)
        elif weight.ndim == 2 and name != "adapter.gates":
            torch.nn.init.normal_(weight, std=0.04)
    for layer in decoder.layers:
        layer.get_parameter("attention.qkv.bias").register_hook(_query_part_only)  # type: ignore[no-untyped-call]
    return decoder


def _query_part_only(gradient: torch.Tensor) -> torch.Tensor:
    """Zero the gradient of the key and value biases: checkpoints of this family have none."""
    masked = gradient.clone()
    masked[len(masked) // 3 :] = 0
    return masked
