"""Writes one of our decoders as a GGUF file, llama.cpp's format, without adapter; of the vocabulary, only its size."""

# D model width, N heads, H head size

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from scripts.peers.packages import require
from scripts.peers.weights import plain_llama

GgufType = Literal["f32", "bf16"]


def write_gguf(
    state: Mapping[str, Tensor], config: DecoderConfig, path: str | os.PathLike[str], *, dtype: GgufType
) -> None:
    """Write our float32 weights: matrices in `dtype`, norms in float32.

    The file is written completely or not at all. Raises MissingPackage without the package `gguf`.
    """
    gguf = require("gguf", package="gguf")
    place = Path(path)
    partial = place.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "llama")
    writer.add_name("random")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if dtype == "f32" else gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType.BF16
    for name, tensor in gguf_tensors(state, config):
        if tensor.ndim == 1 or dtype == "f32":
            writer.add_tensor(name, tensor.numpy())
        else:
            # NumPy has no bfloat16, so the raw bytes are passed.
            writer.add_tensor(name, tensor.to(torch.bfloat16).view(torch.uint8).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(place)


def gguf_tensors(state: Mapping[str, Tensor], config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Names and float32 tensors in the layout of llama.cpp's LLaMA."""
    for _, name, tensor in plain_llama(state, config):
        is_rotated = name.endswith((".attn_q.weight", ".attn_k.weight"))
        rows = tensor.float()
        yield name, interleaved(rows, num_heads=config.num_heads) if is_rotated else rows.contiguous()


def interleaved(weight: Tensor, *, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key projection (D, D): half-split pairs (i, i + H/2) become pairs (2i, 2i + 1)."""
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
