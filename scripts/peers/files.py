"""The files that other programs run. They are made once, in a work folder, from the shared weights."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.names import meta_order
from scripts.peers.exported import export_tower, quantise_onnx, quantise_openvino
from scripts.peers.huggingface import llama_config
from scripts.peers.llama_cpp import Quantisation, quantise_gguf
from scripts.peers.packages import require
from scripts.peers.sizes import place_of
from scripts.peers.weights import (
    bare_tower,
    decoder_sizes,
    decoder_state,
    encoder_state,
    give_all_tokens,
    huggingface_decoder,
)


def make_file(file: str, *, work: Path, size: str, num_threads: int) -> Path:
    """The path of the file, which is created if it is missing. Raises MissingPackage, and any error of the packages."""
    place = place_of(file, work=work, size=size)
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    if file in _CONVERSIONS:
        source, convert = _CONVERSIONS[file]
        convert(make_file(source, work=work, size=size, num_threads=num_threads), place, num_threads)
    else:
        _MAKERS[file](place, size)
    return place


def _write_bf16(place: Path, size: str) -> None:
    config = decoder_sizes(size)
    write_gguf(decoder_state(config), config, place, dtype="bf16")


def _write_config(place: Path, size: str) -> None:
    config = llama_config(decoder_sizes(size), dtype=torch.bfloat16, architectures=["LlamaForCausalLM"])
    config.to_json_file(place)


def _write_tower(place: Path, size: str) -> None:
    config = bare_tower(size)
    give_all_tokens()
    export_tower(config, encoder_state(config), place)


def write_gguf(
    state: Mapping[str, Tensor], config: DecoderConfig, path: str | os.PathLike[str], *, dtype: Literal["f32", "bf16"]
) -> None:
    """Write a decoder as a GGUF file, without adapter: matrices in `dtype`, norms in float32; no words of a vocabulary.

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
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
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
    """Names and float32 tensors in the layout of llama.cpp's LLaMA, whose query and key rows are in Meta's order."""
    gguf = require("gguf", package="gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for theirs, tensor in huggingface_decoder(state, config).items():
        name, rows = names.get_name(theirs, try_suffixes=(".weight",)), tensor.float()
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
        yield name, meta_order(rows, heads) if heads else rows.contiguous()


def _quantise(kind: Quantisation) -> Callable[[Path, Path, int], None]:
    return lambda source, place, threads: quantise_gguf(source, place, kind=kind, num_threads=threads)


_MAKERS: Mapping[str, Callable[[Path, str], None]] = {
    "bf16.gguf": _write_bf16,
    "config.json": _write_config,
    "tokens.onnx": _write_tower,
}
# File -> the file that it is made from, and how: source, target, number of threads.
_CONVERSIONS: Mapping[str, tuple[str, Callable[[Path, Path, int], None]]] = {
    "q8_0.gguf": ("bf16.gguf", _quantise("q8_0")),
    "q4_0.gguf": ("bf16.gguf", _quantise("q4_0")),
    "tokens-int8.onnx": ("tokens.onnx", lambda source, place, threads: quantise_onnx(source, place)),
    "tokens-int8.xml": ("tokens.onnx", lambda source, place, threads: quantise_openvino(source, place)),
}
