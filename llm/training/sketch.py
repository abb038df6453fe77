"""The decoder in training on torch's meta device, without values, to count its memory and its work."""

# A adapter layers, Q queries, N heads, D model width, P parts, R rank, B rows, S tokens, H head size

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.training.adapter import TrainableAdapter
from llama_adapter.llm.training.attention import attend_in_parts
from llama_adapter.llm.training.build import Kind, kind_of
from llama_adapter.llm.training.decoder import TrainableDecoder
from llama_adapter.llm.training.frozen import fits, packed_bytes
from llama_adapter.llm.training.linear import AdaptedLinear
from llama_adapter.llm.weights.names import BIASED, PARTS, part_rows

_META = torch.device("meta")


def sketch_decoder(
    config: DecoderConfig, *, trained: Collection[Kind], lora_rank: int, dtype: torch.dtype, device_type: str
) -> TrainableDecoder:
    """As `build_decoder` for a LLaMA and a new adapter with pictures, for a type of device such as `cuda`."""
    plain = dataclasses.replace(config, separate_adapter_kv=False)
    with _META:
        decoder = LlamaAdapterDecoder(plain)
    for layer in decoder.layers:
        for path in PARTS:
            parent, _, own = path.rpartition(".")
            weight = layer.get_submodule(path).weight
            assert isinstance(weight, Tensor)
            setattr(
                layer.get_submodule(parent),
                own,
                _adapted(weight.shape, path, plain, trained=trained, rank=lora_rank, dtype=dtype),
            )
    head = decoder.head.weight
    assert isinstance(head, Tensor)
    sketched = AdaptedLinear(torch.empty(head.shape, dtype=dtype, device=_META))
    decoder.register_module("head", sketched)
    has_lora = "LoRA factors" in trained
    num_layers = config.num_adapter_layers
    decoder.adapter = TrainableAdapter(
        plain,
        queries_AQD=torch.empty(num_layers, config.num_queries, config.dim, device=_META),
        gate_AG=torch.empty(num_layers, config.num_heads, device=_META),
        new_gate_A=torch.empty(num_layers, device=_META) if has_lora else None,
        has_tanh=True,
    )
    for name, parameter in decoder.named_parameters():
        is_trained = kind_of(name) in trained
        if parameter.dtype != dtype and not is_trained and "adapter." not in name and kind_of(name) != "biases":
            module, _, own = name.rpartition(".")
            frozen = nn.Parameter(parameter.to(dtype), requires_grad=False)
            setattr(decoder.get_submodule(module), own, frozen)
        else:
            parameter.requires_grad_(is_trained)
    decoder = decoder.to(_META)
    found = TrainableDecoder(decoder)
    found.attend = attend_in_parts if device_type == "cpu" or config.score_cap else attend_fused
    return found


def _adapted(
    shape: torch.Size,
    path: str,
    config: DecoderConfig,
    *,
    trained: Collection[Kind],
    rank: int,
    dtype: torch.dtype,
) -> AdaptedLinear:
    outputs, inputs = shape
    rows = part_rows(path, config)
    num_biased = sum(name in BIASED for name in PARTS[path])
    bias = torch.empty(sum(rows[:num_biased]), device=_META) if "biases" in trained else None
    lora = None
    if "LoRA factors" in trained:
        lora = torch.empty(len(rows) * rank, inputs, device=_META), torch.empty(outputs, rank, device=_META)
    return AdaptedLinear(torch.empty(shape, dtype=dtype, device=_META), rows=rows, bias=bias, lora=lora)


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
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BNSH, k_BNPH, v_BNPH, _, _ = ctx.saved_tensors
        return (
            torch.empty_like(q_BNSH, memory_format=torch.contiguous_format),
            torch.empty_like(k_BNPH, memory_format=torch.contiguous_format),
            torch.empty_like(v_BNPH, memory_format=torch.contiguous_format),
        )


def attend_fused(
    q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, *, is_causal: bool = False, window: int = 0, cap: float = 0.0
) -> Tensor:
    """Attention without values, for devices with fused kernels."""
    heads_BNSH: Tensor = _Fused.apply(q_BNSH, k_BGPH, v_BGPH)  # type: ignore[no-untyped-call]
    return heads_BNSH
