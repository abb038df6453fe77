"""From a decoder's state dict to an executor on a device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llm.config import DecoderConfig
from llm.model.llama import LlamaAdapterDecoder
from llm.runtime.backend import Backend
from llm.runtime.executor import EagerExecutor, Executor


def decoder_from_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> LlamaAdapterDecoder:
    """Decoder for inference around the tensors of `state`, which are shared, not copied.

    Raises RuntimeError when keys or shapes are not those of `config`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config)
    decoder.load_state_dict(state, assign=True)
    return decoder.eval().requires_grad_(False)


def open_executor(config: DecoderConfig, state: Mapping[str, Tensor], *, backend: Backend, num_slots: int) -> Executor:
    """Executor with `num_slots` rows around the tensors of `state`, moved to the backend's device."""
    decoder = decoder_from_state(config, state).to(backend.device)
    return EagerExecutor(decoder, backend=backend, num_slots=num_slots)
