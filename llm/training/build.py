"""Builds the decoder that is trained from a LLaMA and an adapter's file, and converts it back to the file's tensors.

Nothing is merged or folded. Rows of q and k are in half-split order in the decoder, and in Meta's order in the file.
"""

# A adapter layers, B pictures, Q queries, N heads, D model width, G gates of a layer: N, or one for all heads

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.adapter import Adapter
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.training.decoder import TrainableDecoder
from llama_adapter.llm.training.frozen import FrozenWeight, PackedWeight, fits
from llama_adapter.llm.training.linear import AdaptedLinear, new_factors
from llama_adapter.llm.weights.adapter import AdapterFile, lora_names
from llama_adapter.llm.weights.build import decoder_tensors
from llama_adapter.llm.weights.names import (
    BIASED,
    LAYER_NORMS,
    PARTS,
    LlamaSource,
    norm_shapes,
    part_rows,
    to_half_split,
    to_meta_order,
)
from llama_adapter.runtime.kernels.library import Library

Kind = Literal["queries", "gates", "norms", "biases", "LoRA factors", "output head"]
DECODER_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


class TrainableAdapter(Adapter):
    """`Adapter` that computes the factors of its values.

    They are tanh(gate) * new_gate, or the gate itself for adapters of LLaMA-Adapter V1.
    """

    def __init__(
        self, config: DecoderConfig, *, queries_AQD: Tensor, gate_AG: Tensor, new_gate_A: Tensor | None, has_tanh: bool
    ) -> None:
        """Tensors are float32. No parameter is trained until `requires_grad_` is called."""
        super().__init__(dataclasses.replace(config, separate_adapter_kv=False))
        del self.gates
        self.queries = nn.Parameter(queries_AQD, requires_grad=False)
        self.gate = nn.Parameter(gate_AG, requires_grad=False)
        self.new_gate = None if new_gate_A is None else nn.Parameter(new_gate_A, requires_grad=False)
        self.has_tanh = has_tanh

    def folded_gates(self) -> Tensor:
        """The factors, (A, G) float32. With a single query, the reference does not apply new_gate."""
        gates = self.gate.tanh() if self.has_tanh else self.gate
        if self.new_gate is not None and self.queries.shape[1] > 1:
            gates = gates * self.new_gate[:, None]
        return gates

    def forward(self, visual_query_BQD: Tensor, attentions: Sequence[Any]) -> Prefix:
        """As `Adapter`. Sums and gates are computed in float32, and the result has the type of the visual query."""
        keys, values = super().forward(visual_query_BQD, attentions)
        return Prefix(keys.to(visual_query_BQD.dtype), values.to(visual_query_BQD.dtype))

    def project(self, tokens_BQD: Tensor, *, layer: int, attention: Any) -> Tensor:
        projected: Tensor = attention.qkv.bare(tokens_BQD)
        return projected


def build_decoder(
    config: DecoderConfig,
    *,
    source: LlamaSource,
    adapter: AdapterFile,
    trained: Collection[Kind],
    lora_rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    kernels: Library | None = None,
) -> TrainableDecoder:
    """The decoder of `source` and `adapter` on `device`, with frozen weights in `dtype` and `trained` kinds in float32.

    `config` comes from `plan_decoder`. If biases are trained and the adapter has none, they begin at 0. If LoRA factors
    are trained and the adapter has none, updates of rank `lora_rank` begin at 0; factors of the file keep their rank.
    With `kernels`, frozen weights of linear layers are packed for the kernels, and the plain weights are not kept.
    """
    random = torch.Generator().manual_seed(seed)
    plain = dataclasses.replace(config, separate_adapter_kv=False)
    kept = {k: v for k, v in adapter.llama.items() if ".lora_" not in k and not k.endswith(("bias", "_scale"))}
    bare = dataclasses.replace(adapter, llama=kept)
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(plain)
    tensors = decoder_tensors(plain, source=source, adapter=bare, dtype=None, scale_dtype=dtype)
    for name, tensor in tensors:
        place, _, own = name.rpartition(".")
        module = decoder.get_submodule(place)
        if place == "adapter":
            continue  # read from the adapter's file below
        if own == "bias":
            block, path = place.removeprefix("layers.").split(".", 1)
            if any(f"layers.{block}.{part}.bias" in source.tensors for part in PARTS[path]):
                assert isinstance(module, AdaptedLinear), "weights precede their biases"
                module.take_bias(tensor.to(device))
            continue
        if place == "head" and "output head" in trained:
            decoder.register_module("head", AdaptedLinear(tensor.to(device, torch.float32, copy=True)))
            continue
        if isinstance(module, nn.Linear):
            tensor = tensor.to(device, dtype)
            weight: FrozenWeight = tensor
            if kernels is not None and fits(tensor.shape, dtype):
                weight = PackedWeight(tensor, library=kernels)
            if place == "head":
                decoder.register_module("head", AdaptedLinear(weight))
                continue
            parent, _, last = place.rpartition(".")
            block, _, path = place.removeprefix("layers.").partition(".")
            adapted = _adapted(
                weight,
                path,
                config=config,
                prefix=f"layers.{block}.",
                adapter=adapter,
                has_biases="biases" in trained,
                rank=lora_rank if "LoRA factors" in trained else 0,
                device=device,
                random=random,
            )
            setattr(decoder.get_submodule(parent), last, adapted)
            del tensor, weight  # before the next one is made
            continue
        is_trained_norm = "norm" in place and "norms" in trained
        value = tensor.to(device, torch.float32 if is_trained_norm else dtype, copy=is_trained_norm)
        setattr(module, own, nn.Parameter(value, requires_grad=False))
        del tensor
    decoder.adapter = _adapter(config, adapter=adapter, has_lora="LoRA factors" in trained, device=device)
    decoder.rotaries.to(device)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(kind_of(name) in trained)
    return TrainableDecoder(decoder)


def kind_of(name: str) -> Kind | None:
    """The kind of a parameter of the decoder, or of a tensor of `llama_tensors`, by its name.

    None for parameters that are never trained.
    """
    own = name.rpartition(".")[2]
    if name in ("head.weight", "output.weight"):
        return "output head"
    if ".lora_" in name:
        return "LoRA factors"
    if own == "bias":
        return "biases"
    if "norm." in name:
        return "norms"
    if own in ("gate", "new_gate"):
        return "gates"
    return "queries" if own == "queries" else None


def _adapted(
    weight: FrozenWeight,
    path: str,
    *,
    config: DecoderConfig,
    prefix: str,
    adapter: AdapterFile,
    has_biases: bool,
    rank: int,
    device: torch.device | str,
    random: torch.Generator,
) -> AdaptedLinear:
    file, parts, rows = adapter.llama, PARTS[path], part_rows(path, config)
    biased = [name for name in parts if name in BIASED]
    bias = None
    if f"{prefix}{biased[0]}.bias" in file:
        bias = torch.cat([to_half_split(name, file[f"{prefix}{name}.bias"].float(), config) for name in biased])
    elif has_biases:
        bias = torch.zeros(sum(rows[: len(biased)]))
    names = [lora_names(prefix + name) for name in parts]
    lora = None
    if names[0][0] in file:
        outs = [to_half_split(name, file[l2].float(), config) for name, (_, l2) in zip(parts, names, strict=True)]
        lora = torch.cat([file[l1].float() for l1, _ in names]), torch.cat(outs)
    elif rank:
        lora = new_factors(weight.shape[1], rows, rank=rank, random=random)
    return AdaptedLinear(
        weight,
        rows=rows,
        bias=None if bias is None else bias.to(device),
        lora=None if lora is None else (lora[0].to(device), lora[1].to(device)),
    )


def _adapter(
    config: DecoderConfig, *, adapter: AdapterFile, has_lora: bool, device: torch.device | str
) -> TrainableAdapter:
    layers = range(config.first_adapter_layer, config.num_layers)
    gates = [adapter.llama[f"layers.{layer}.attention.gate"].float().flatten() for layer in layers]
    gate_AG = torch.stack(gates) if gates else torch.zeros(0, config.num_heads)
    new_names = [f"layers.{layer}.attention.new_gate" for layer in layers]
    new_gate_A = None
    if any(name in adapter.llama for name in new_names):
        new_gate_A = torch.cat([adapter.llama[name].float().flatten() for name in new_names])
    elif has_lora and not adapter.has_lora:
        new_gate_A = torch.ones(len(layers))
    queries = adapter.queries.float().reshape(config.num_adapter_layers, config.num_queries, config.dim)
    with torch.device("meta"):
        return TrainableAdapter(
            config,
            queries_AQD=queries.to(device, copy=True),
            gate_AG=gate_AG.to(device),
            new_gate_A=None if new_gate_A is None else new_gate_A.to(device),
            has_tanh=adapter.sees_pictures,
        )


def llama_tensors(trainable: TrainableDecoder) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the LLaMA part of the adapter's file, by their names without `llama.`, float32 on the CPU.

    They include all norms, and the output head if it is trained. Gates of layers without adapter are zeros.
    """
    decoder = trainable.decoder
    config, adapter = decoder.config, decoder.adapter
    assert isinstance(adapter, TrainableAdapter)
    for layer, block in enumerate(decoder.layers):
        prefix, j = f"layers.{layer}.", layer - config.first_adapter_layer
        gates = adapter.gate[j] if j >= 0 else torch.zeros(adapter.gate.shape[1])
        yield f"{prefix}attention.gate", _file(gates)
        if adapter.new_gate is not None:
            new_gate = adapter.new_gate[j] if j >= 0 else torch.ones(())
            yield f"{prefix}attention.new_gate", _file(new_gate).reshape(1, 1, 1, 1)
        for name in norm_shapes(config):
            yield f"{prefix}{name}.weight", _file(block.get_parameter(f"{LAYER_NORMS[name]}.weight"))
        for path, parts in PARTS.items():
            yield from _of_linear(block.get_submodule(path), parts, prefix=prefix, config=config)
    yield "norm.weight", _file(decoder.norm.weight)
    head = decoder.head.weight
    if isinstance(head, Tensor) and head.requires_grad:
        yield "output.weight", _file(head)


def _of_linear(
    linear: nn.Module, parts: tuple[str, ...], *, prefix: str, config: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    assert isinstance(linear, AdaptedLinear)
    if linear.bias is not None:
        biased = [name for name in parts if name in BIASED]
        for name, bias in zip(biased, torch.split(_file(linear.bias), list(linear.rows[: len(biased)])), strict=True):
            yield f"{prefix}{name}.bias", to_meta_order(name, bias, config)
    if linear.lora_in is None or linear.lora_out is None:
        return
    pairs = zip(
        _file(linear.lora_in).chunk(len(parts)), torch.split(_file(linear.lora_out), list(linear.rows)), strict=True
    )
    for name, (l1, l2) in zip(parts, pairs, strict=True):
        names = lora_names(prefix + name)
        yield names[0], l1
        yield names[1], to_meta_order(name, l2, config)


def _file(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)
