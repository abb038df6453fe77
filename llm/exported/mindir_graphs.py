"""Writes the decoder's graphs as MindIR files that share one weight file. No tensor is loaded."""

# R rows, S tokens of the step per row, P cached positions per row, T wanted tokens, N heads, G heads of keys and
# values, H head size, Q adapter queries, D model width, V vocabulary

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.step import (
    EMBEDDINGS,
    IDS,
    LOGITS,
    MASK,
    POSITIONS,
    SAMPLING,
    TOKENS,
    VISUAL_QUERY,
    WANTED,
    layer_ports,
    num_prefix_layers,
)
from llama_adapter.llm.exported.weights_file import Stored
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.mindir import External, import_mindspore, write_mindir

# Names of the graphs in a card's settings.
PREFILL, INCREMENT, PREFIX, ENCODER = "prefill", "increment", "prefix", "encoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class MindirDecoder:
    """A decoder to write: its sizes, its dtype, and the locations of its weights.

    `weights` locates the tensors of the state dict and those of `rotary_tables` in the file `weights_file` of `folder`.
    """

    config: DecoderConfig
    dtype: str  # float32 or float16
    weights: Mapping[str, Stored]
    folder: Path
    weights_file: str  # its path in `folder`
    has_embeddings: bool = False  # whether its steps take embeddings in place of ids, for pictures

    def write_step(self, path: str, *, has_cache: bool, has_sampling: bool) -> None:
        """The graph of an increment if `has_cache`, else of a prefill."""
        from llama_adapter.llm.exported.mindspore_cells import Step

        has = {"has_cache": has_cache, "has_sampling": has_sampling, "has_embeddings": self.has_embeddings}
        cell = Step(self.config, self._mindspore_dtype, **has)
        inputs = step_inputs(self.config, dtype=self.dtype, **has)
        outputs = [TOKENS, LOGITS, *layer_ports("new", self.config.num_layers)]
        self._write(cell, path, inputs=inputs, outputs=outputs, of=self.weights)

    def write_prefix(self, path: str) -> None:
        """The graph from the visual query (R, Q, D) to the prefix."""
        config, weights = self.config, dict(self.weights)
        rows = config.attention_dim, config.attention_dim + 2 * config.kv_dim  # of keys and values in `qkv`
        for j in range(config.num_adapter_layers):
            attention = f"layers.{config.first_adapter_layer + j}.attention"
            own = weights.get(f"adapter.kv.{j}.weight")
            weights[f"layers.{j}.projection.weight"] = own or weights[f"{attention}.qkv.weight"].rows(*rows)
            weights[f"layers.{j}.projection.bias"] = weights[f"{attention}.qkv.bias"].rows(*rows)
            if config.qk_norm != "none":
                weights[f"layers.{j}.norm.weight"] = weights[f"{attention}.k_norm.weight"]
        query = Port(name=VISUAL_QUERY, dtype=self.dtype, shape=(-1, config.num_queries, config.dim))
        from llama_adapter.llm.exported.mindspore_cells import PrefixProjection

        cell = PrefixProjection(config, self._mindspore_dtype)
        self._write(cell, path, inputs=(query,), outputs=layer_ports("prefix", config.num_adapter_layers), of=weights)

    def _write(
        self, cell: Any, path: str, *, inputs: tuple[Port, ...], outputs: list[str], of: Mapping[str, Stored]
    ) -> None:
        place = self.folder / path
        location = str((self.folder / self.weights_file).relative_to(place.parent))
        weights = {name: External(location, stored.offset, stored.num_bytes) for name, stored in of.items()}
        write_mindir(cell, place, inputs=inputs, outputs=outputs, weights=weights)

    @property
    def _mindspore_dtype(self) -> Any:
        return getattr(import_mindspore(), self.dtype)


def rotary_tables(config: DecoderConfig) -> dict[str, np.ndarray]:
    """The tables of the step's rotary embeddings, float32 (context, H) each, by the name of the parameter."""
    found: dict[str, np.ndarray] = {}
    for index, rotary in enumerate(config.distinct_rotaries):
        cos, sin = rotary.table(config.head_dim, context=config.context)
        found |= {f"rotaries.{index}.cos": cos, f"rotaries.{index}.sin": sin}
    return found


def step_inputs(
    config: DecoderConfig, *, dtype: str, has_cache: bool, has_sampling: bool, has_embeddings: bool
) -> tuple[Port, ...]:
    """Inputs of an increment if `has_cache`, else of a prefill. R, S, P and T are dynamic.

    Prefixes of the adapter layers are (R, N, Q, H), and caches of all layers (R, G, P, H).
    """
    size = config.head_dim
    ports = [
        Port(name=IDS, dtype="int32", shape=(-1, -1)),
        Port(name=POSITIONS, dtype="int32", shape=(-1, -1)),
        Port(name=MASK, dtype="bool", shape=(-1, -1, -1)),
        Port(name=WANTED, dtype="int32", shape=(-1,)),
    ]
    if has_sampling:
        types = ("float32", "float32", "int32", "float32")
        ports += [Port(name=name, dtype=kind, shape=(-1,)) for name, kind in zip(SAMPLING, types, strict=True)]
    if has_embeddings:
        ports.append(Port(name=EMBEDDINGS, dtype=dtype, shape=(-1, -1, config.dim)))
    prefix, cache = (-1, config.num_heads, config.num_queries, size), (-1, config.num_kv_heads, -1, size)
    ports += [Port(name=name, dtype=dtype, shape=prefix) for name in layer_ports("prefix", num_prefix_layers(config))]
    if has_cache:
        ports += [Port(name=name, dtype=dtype, shape=cache) for name in layer_ports("cache", config.num_layers)]
    return tuple(ports)
