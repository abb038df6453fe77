"""Loads a decoder from its state dict, and creates runners on a device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, use_operators, use_ranks
from llama_adapter.llm.runners.base import Runner
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.graph import GraphRunner
from llama_adapter.llm.runners.kernels import KernelRunner, can_run
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT
from llama_adapter.runtime.devices import EAGER, Backend
from llama_adapter.runtime.devices.cpu_linear import kernel_arrays
from llama_adapter.runtime.operators import Operators
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes.layers import load_state, load_stream
from llama_adapter.runtime.schemes.scheme import dtype_name


def decoder_from_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> LlamaAdapterDecoder:
    """A decoder for inference that shares the tensors of `state`.

    Quantised layers can compute only after a backend has prepared them. Raises RuntimeError if names or shapes differ
    from those of `config`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config)
    load_state(decoder, state)
    return decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedDecoder:
    """A decoder on its device, with weights in the device's layout. Its runners share the weights."""

    decoder: LlamaAdapterDecoder
    config: EngineConfig
    backend: Backend
    operators: Operators

    def runner(self, num_slots: int, **cache: int) -> Runner:
        """A new runner with `num_slots` rows. It has its own keys and values.

        `cache` may have other values of `block` and `spare_blocks` than the config.
        """
        config, backend = replace(self.config, num_slots=num_slots, **cache), self.backend  # type: ignore[arg-type]
        if config.mode != EAGER:
            return GraphRunner(self.decoder, config, backend=backend, operators=self.operators)
        if (library := backend.kernels) is not None and can_run(config.decoder):
            arrays, dtype = kernel_arrays(self.decoder), dtype_name(config.dtype)
            ranks = None if self.decoder.ranks is ALONE else self.decoder.ranks
            if arrays is not None:
                return KernelRunner(config, arrays, dtype=dtype, library=library, ranks=ranks)
        shapes = BUCKETED if backend.capabilities.static_shapes else EXACT
        return EagerRunner(self.decoder, config, backend=backend, operators=self.operators, shapes=shapes)


def place_decoder(
    config: EngineConfig, tensors: Iterable[tuple[str, Tensor]], *, backend: Backend, ranks: Alone = ALONE
) -> PlacedDecoder:
    """Place the decoder with these tensors on the backend's device, without rows.

    With `ranks`, sizes and tensors are the share of one rank (llm/split.py). A layer is converted to the device's
    layout when all its tensors have arrived, and its original tensors are then released. The peak memory is therefore
    one model and one layer, if `tensors` keeps no references. Raises as `decoder_from_state`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config.decoder)
    operators = backend.choose_operators(config.decoder, dtype=config.dtype, wanted=config.operators, mode=config.mode)
    load_stream(decoder, tensors, device=backend.device, finish=partial(backend.prepare, wanted=config.operators))
    decoder = decoder.to(backend.device)
    use_operators(decoder, operators)
    use_ranks(decoder, ranks)
    backend.empty_caches()
    return PlacedDecoder(decoder=decoder, config=config, backend=backend, operators=operators)
