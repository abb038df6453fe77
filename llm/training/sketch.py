"""The decoder in training on torch's meta device, without values, to count its memory and its work."""

# N heads, G heads of keys and values, B rows, S tokens, P positions, H head size

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.training.attention import attend_in_parts
from llama_adapter.llm.training.build import Kind, build_decoder
from llama_adapter.llm.training.decoder import TrainableDecoder
from llama_adapter.llm.training.frozen import fits, packed_bytes
from llama_adapter.llm.training.linear import AdaptedLinear
from llama_adapter.llm.weights.adapter import AdapterFile
from llama_adapter.llm.weights.names import LlamaSource, SplitTensor, llama_shapes

_META = torch.device("meta")


def sketch_decoder(
    config: DecoderConfig, *, trained: Collection[Kind], lora_rank: int, dtype: torch.dtype, device_type: str
) -> TrainableDecoder:
    """As `build_decoder` for a LLaMA and a new adapter with pictures, for a type of device such as `cuda`."""
    plain = dataclasses.replace(config, separate_adapter_kv=False)
    llama = dataclasses.replace(plain, num_adapter_layers=0, num_queries=0)
    with _META:
        tensors = {name: SplitTensor((torch.empty(shape, dtype=dtype),)) for name, shape in llama_shapes(llama).items()}
        queries = torch.empty(config.num_adapter_layers * config.num_queries, config.dim)
        gates = {f"layers.{layer}.attention.gate": torch.empty(config.num_heads) for layer in range(config.num_layers)}
        found = build_decoder(
            plain,
            source=LlamaSource(name="LLaMA", config=llama, half_split=True, tensors=tensors, files=()),
            adapter=AdapterFile(
                name="adapter", queries=queries, visual={"queries": queries}, llama=gates, clip={}, declares={}
            ),
            trained=trained,
            lora_rank=lora_rank,
            dtype=dtype,
            device=_META,
            seed=0,
        )
    found.attend = attend_in_parts if device_type == "cpu" or config.score_cap else attend_fused
    return found


def frozen_weights(decoder: nn.Module) -> list[Tensor]:
    """The frozen weights of linear layers."""
    weights = [layer.weight for layer in decoder.modules() if isinstance(layer, AdaptedLinear)]
    return [weight for weight in weights if isinstance(weight, Tensor)]


def packed_more(decoder: nn.Module) -> int:
    """Additional bytes of the weights of linear layers if they are packed for the kernels, see `PackedWeight`."""
    weights = [weight for weight in frozen_weights(decoder) if fits(weight.shape, weight.dtype)]
    return sum(packed_bytes(weight.shape, weight.dtype) - weight.nbytes for weight in weights)


class _Fused(torch.autograd.Function):
    """Keeps the tensors that fused attention kernels keep: inputs, output and a sum per query (Dao et al., 2022)."""

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor) -> Tensor:
        out_BNSH = torch.empty_like(q_BNSH, memory_format=torch.contiguous_format)
        sums_BNS = torch.empty(q_BNSH.shape[:-1], dtype=torch.float32, device=q_BNSH.device)
        ctx.save_for_backward(q_BNSH, k_BNPH, v_BNPH, out_BNSH, sums_BNS)
        return out_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors[:3]
        return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs)


def attend_fused(
    q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, *, is_causal: bool = False, window: int = 0, cap: float = 0.0
) -> Tensor:
    """Attention without values, for devices with fused kernels."""
    heads_BNSH: Tensor = _Fused.apply(q_BNSH, k_BGPH, v_BGPH)  # type: ignore[no-untyped-call]
    return heads_BNSH
