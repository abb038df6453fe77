"""Builds the configuration and the state dict of a decoder from a LLaMA and an adapter, on the CPU.

LoRA is merged and gates are folded in float32. The cast to the target dtype comes last.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.split import META_CUTS, span
from llama_adapter.llm.weights.adapter import AdapterFile, check_fits, lora_names
from llama_adapter.llm.weights.names import LAYER_NORMS, PARTS, LlamaSource, narrowed, norm_shapes, to_half_split
from llama_adapter.runtime.errors import CheckpointError


def plan_decoder(
    source: LlamaSource, adapter: AdapterFile | None, *, vocab_size: int, context: int = 512
) -> DecoderConfig:
    """The configuration of the decoder. No tensor is read.

    Without an adapter, the decoder is a plain LLaMA. `vocab_size` is that of the tokenizer; further rows of embedding
    and head are padding and left out. `context` is in tokens. Raises CheckpointError if tokenizer, LLaMA and adapter do
    not fit together, or if the adapter is incomplete.
    """
    if source.config.vocab_size < vocab_size:
        raise CheckpointError(
            f"The tokenizer has {vocab_size} pieces, and the LLaMA in `{source.name}` has {source.config.vocab_size} "
            "tokens",
            hint="use the tokenizer of these weights; that of LLaMA-7B has 32000 pieces",
        )
    plain = dataclasses.replace(source.config, vocab_size=vocab_size, context=context)
    if adapter is None:
        return plain
    check_fits(adapter, plain, llama=source.name)
    return dataclasses.replace(
        plain,
        num_adapter_layers=adapter.num_adapter_layers,
        num_queries=adapter.num_queries,
        separate_adapter_kv=adapter.has_lora,
    )


def decoder_tensors(
    config: DecoderConfig,
    *,
    source: LlamaSource,
    adapter: AdapterFile | None,
    dtype: torch.dtype | None,
    scale_dtype: torch.dtype | None = None,
    share: DecoderConfig | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The state dict tensor by tensor, so that memory holds one matrix at a time.

    `config` must come from `plan_decoder` with the same source and adapter. `share` is one rank's share of `config`;
    only this rank's rows and columns are then read. Without `dtype`, a tensor has the dtype of its file, or float32 if
    it is computed. The source's `embedding_scale` is rounded to `scale_dtype`, in which the model computes. By default
    that is `dtype`, or float32.
    """
    scale_dtype = scale_dtype or dtype or torch.float32
    return _Merge(config, config if share is None else share, source, adapter, dtype, scale_dtype).tensors()


class _Merge:
    """Merges LLaMA and adapter. Tensors are computed in float32 and yielded in `dtype`, see `decoder_tensors`."""

    def __init__(
        self,
        whole: DecoderConfig,
        config: DecoderConfig,
        source: LlamaSource,
        adapter: AdapterFile | None,
        dtype: torch.dtype | None,
        scale_dtype: torch.dtype,
    ) -> None:
        self.whole, self.config = whole, config
        self.dtype, self.scale_dtype = dtype, scale_dtype
        self.source = source
        self.adapter = adapter.llama if adapter else {}
        self.queries = adapter.queries if adapter else None
        # LLaMA-Adapter V1 multiplies by the gate itself, without tanh.
        self.has_tanh = adapter is not None and adapter.sees_pictures

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "embedding.weight", self._cast(self._embedding())
        for layer in range(self.config.num_layers):
            yield from self._layer(layer)
        yield "norm.weight", self._cast(self._base("norm.weight"))
        yield "head.weight", self._head()
        yield from ((name, self._cast(tensor)) for name, tensor in self._adapter_queries_and_gates())

    def _embedding(self) -> Tensor:
        embedding, scale = self._base("tok_embeddings.weight"), self.source.embedding_scale
        if scale == 1 or "tok_embeddings.weight" in self.adapter:
            return embedding
        return embedding.float() * torch.tensor(scale, dtype=self.scale_dtype)

    def _head(self) -> Tensor:
        head = self._base("output.weight")
        cast = self._cast(head)
        if cast.data_ptr() != head.data_ptr():
            return cast
        # Tied weights become two parameters, so that training one does not change the other.
        is_made = self.source.embedding_scale != 1 or self.source.tensors["tok_embeddings.weight"].is_made
        is_tied = not is_made and head.data_ptr() == self._base("tok_embeddings.weight").data_ptr()
        return cast.clone() if is_tied else cast

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype or tensor.dtype).contiguous()

    def _layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        prefix = f"layers.{layer}."
        for name in norm_shapes(self.config):
            yield f"{prefix}{LAYER_NORMS[name]}.weight", self._cast(self._base(f"{prefix}{name}.weight"))
        j = layer - self.config.first_adapter_layer
        if self.config.separate_adapter_kv and j >= 0:
            names = ["attention.wk", "attention.wv"]
            yield f"adapter.kv.{j}.weight", self._stacked(prefix, names, with_lora=False)
        for target, parts in PARTS.items():
            yield f"{prefix}{target}.weight", self._stacked(prefix, parts)
            yield f"{prefix}{target}.bias", self._cast(torch.cat([self._bias(prefix, name) for name in parts]))

    def _stacked(self, prefix: str, names: Sequence[str], *, with_lora: bool = True) -> Tensor:
        """The rows of several matrices, concatenated. Memory holds the result and one matrix."""

        def matrix(name: str) -> Tensor:
            bare = self._matrix(prefix, name)
            return self._merged(prefix, name, bare) if with_lora else bare

        if len(names) == 1:
            return self._cast(matrix(names[0]))
        num_rows = [self._num_rows(prefix, name) for name in names]
        num_columns = self.source.tensors[f"{prefix}{names[0]}.weight"].shape[1]  # these are divided by rows
        dtypes = [self._dtype(f"{prefix}{name}.weight") for name in names]
        computed = [change for name in names for change in (lora_names(prefix + name)[0], f"{prefix}{name}_scale")]
        if with_lora and any(change in self.adapter for change in computed):
            dtypes.append(torch.float32)
        stored = functools.reduce(torch.promote_types, dtypes)
        stacked = torch.empty(sum(num_rows), num_columns, dtype=self.dtype or stored)
        start = 0
        for count, name in zip(num_rows, names, strict=True):
            stacked[start : start + count] = matrix(name)
            start += count
        return stacked

    def _cut(self, name: str) -> tuple[int, range] | None:
        """Axis and range of this rank's part of a tensor of LLaMA; None if this rank has all of it."""
        matrix = name.removesuffix(".weight")
        cut = META_CUTS.get(re.sub(r"^layers\.\d+\.", "", matrix))
        if cut is None:
            return None
        part = span(cut.units[0], whole=self.whole, share=self.config)[0]
        return (cut.axis, part) if len(part) < self.source.tensors[f"{matrix}.weight"].shape[cut.axis] else None

    def _num_rows(self, prefix: str, name: str) -> int:
        cut = self._cut(prefix + name)
        return self.source.tensors[f"{prefix}{name}.weight"].shape[0] if cut is None or cut[0] == 1 else len(cut[1])

    def _adapter_queries_and_gates(self) -> Iterator[tuple[str, Tensor]]:
        config = self.config
        shape = (config.num_adapter_layers, config.num_queries, config.dim)
        queries = torch.zeros(0) if self.queries is None else self.queries.float()
        yield "adapter.queries", queries.reshape(shape)
        gates = torch.zeros(config.num_adapter_layers, config.num_heads, dtype=torch.float32)
        for j in range(config.num_adapter_layers):
            prefix = f"layers.{config.first_adapter_layer + j}.attention."
            gate = self.adapter[f"{prefix}gate"].float().flatten()
            if gate.numel() > 1:
                gate = gate[config.heads.start : config.heads.stop]
            gates[j] = gate.tanh() if self.has_tanh else gate
            new_gate = self.adapter.get(f"{prefix}new_gate")
            # With a single query, the reference does not apply new_gate.
            if new_gate is not None and config.num_queries > 1:
                gates[j] *= new_gate.float().item()
        yield "adapter.gates", gates

    def _base(self, name: str) -> Tensor:
        """A tensor of LLaMA. A tensor of this name in the adapter file, such as a trained norm, takes precedence."""
        override, cut = self.adapter.get(name), self._cut(name)
        if override is None:
            return self.source.tensors[name].read(cut)
        return override if cut is None else narrowed(override, cut)

    def _dtype(self, name: str) -> torch.dtype:
        """The dtype of `_base(name)`, without reading the tensor."""
        return (self.adapter[name] if name in self.adapter else self.source.tensors[name]).dtype

    def _matrix(self, prefix: str, name: str) -> Tensor:
        """The matrix without LoRA, with q and k rows in half-split order."""
        full = f"{prefix}{name}.weight"
        weight = self._base(full)
        in_meta_order = full in self.adapter or not self.source.half_split
        return to_half_split(name, weight, self.config) if in_meta_order else weight

    def _merged(self, prefix: str, name: str, bare: Tensor) -> Tensor:
        cut, scale = self._cut(prefix + name), self.adapter.get(f"{prefix}{name}_scale")
        if scale is not None:  # chat adapters scale inputs, which are columns
            return bare.float() * (narrowed(scale, (0, cut[1])) if cut is not None and cut[0] == 1 else scale).float()
        l1, l2 = lora_names(prefix + name)
        if l1 not in self.adapter:
            return bare
        factors = [self.adapter[l2], self.adapter[l1]]  # (out, rank) times (rank, in); LoRA's scale is 1
        if cut is not None:
            factors[cut[0]] = narrowed(factors[cut[0]], cut)
        update = factors[0].float() @ factors[1].float()
        return to_half_split(name, update, self.config).add_(bare)

    def _bias(self, prefix: str, name: str) -> Tensor:
        own = f"{prefix}{name}.bias"
        bias = self.adapter.get(own, self.adapter.get(f"{prefix}{name}_bias"))
        cut = self._cut(prefix + name)
        is_elsewhere = cut is not None and cut[0] == 1 and self.config.rank > 0  # added once, after the sum over ranks
        if is_elsewhere or (bias is None and own not in self.source.tensors):
            return torch.zeros(self._num_rows(prefix, name))
        cut = cut if cut is not None and cut[0] == 0 else None
        if bias is None:
            stored = self.source.tensors[own].read(cut).float()
            return stored if self.source.half_split else to_half_split(name, stored, self.config)
        return to_half_split(name, (bias if cut is None else narrowed(bias, cut)).float(), self.config)
