"""From a decoder's state dict to an executor on a device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llm.config import DecoderConfig
from llm.errors import DeviceError
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


def slot_bytes(config: DecoderConfig, *, dtype: torch.dtype) -> int:
    """Memory of one slot: keys and values of every position, and those of the picture."""
    cached = config.num_layers * config.context + config.num_adapter_layers * config.num_queries
    return 2 * cached * config.dim * dtype.itemsize


def open_executor(config: DecoderConfig, state: Mapping[str, Tensor], *, backend: Backend, num_slots: int) -> Executor:
    """Executor with `num_slots` rows around the tensors of `state`, moved to the backend's device.

    Raises DeviceError, before anything large is made, when the slots would not fit into the device's memory.
    """
    wanted = num_slots * slot_bytes(config, dtype=state["embedding.weight"].dtype)
    free = backend.free_bytes()
    if free is not None and wanted > free:
        raise DeviceError(
            f"{num_slots} slots with a context of {config.context} need {wanted / 1e9:.1f} GB for keys and values, and "
            f"{free / 1e9:.1f} GB are free on {backend.name}",
            hint="try a smaller --batch-size or --context",
        )
    decoder = decoder_from_state(config, state).to(backend.device)
    return EagerExecutor(decoder, backend=backend, num_slots=num_slots)
