"""A whole decoder from LLaMA and adapter files, as the checkpoints' tests compare it."""

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.adapter import AdapterFile
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.names import LlamaSource


def build_decoder(
    source: LlamaSource,
    adapter: AdapterFile | None,
    *,
    vocab_size: int,
    context: int = 512,
    dtype: torch.dtype = torch.float32,
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Configuration and state dict of `LlamaAdapterDecoder`; without an adapter, LLaMA alone."""
    config = plan_decoder(source, adapter, vocab_size=vocab_size, context=context)
    return config, dict(decoder_tensors(config, source=source, adapter=adapter, dtype=dtype))
