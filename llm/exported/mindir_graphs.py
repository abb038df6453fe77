"""Writes the decoder's graphs as MindIR files that share one weight file. No tensor is loaded."""

# R rows, S tokens of the step per row, P cached positions per row, T wanted tokens, N heads, H head size,
# Q adapter queries, D model width, V vocabulary

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.step import (
    IDS,
    LOGITS,
    MASK,
    POSITIONS,
    SAMPLING,
    TOKENS,
    VISUAL_QUERY,
    WANTED,
    layer_ports,
)
from llama_adapter.llm.exported.weights_file import Stored
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.mindir import External, import_mindspore, write_mindir

# Names of the graphs in a card's settings.
PREFILL, INCREMENT, PREFIX, ENCODER = "prefill", "increment", "prefix", "encoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class MindirDecoder:
    """A decoder to write: its sizes, its dtype, and the locations of its weights.

    `weights` locates the tensors of the state dict, `rotary_cos` and `rotary_sin` in the file
    `weights_file` of `folder`.
    """

    config: DecoderConfig
    dtype: str  # float32 or float16
    weights: Mapping[str, Stored]
    folder: Path
    weights_file: str  # its path in `folder`

    def write_step(self, path: str, *, has_cache: bool, has_sampling: bool) -> None:
        """The graph of an increment if `has_cache`, else of a prefill."""
        from llama_adapter.llm.exported.mindspore_cells import Step

        cell = Step(self.config, self._mindspore_dtype, has_cache=has_cache, has_sampling=has_sampling)
        inputs = step_inputs(self.config, dtype=self.dtype, has_cache=has_cache, has_sampling=has_sampling)
        outputs = [TOKENS, LOGITS, *layer_ports("new", self.config.num_layers)]
        self._write(cell, path, inputs=inputs, outputs=outputs, of=self.weights)

    def write_prefix(self, path: str) -> None:
        """The graph from the visual query (R, Q, D) to the prefix. Raises GraphError if keys or values have a bias."""
        config, weights = self.config, dict(self.weights)
        for j in range(config.num_adapter_layers):
            packed = f"layers.{config.first_adapter_layer + j}.attention.qkv"
            if weights[f"{packed}.bias"].rows(config.dim, 3 * config.dim).read(self.folder / self.weights_file).any():
                raise not_computed("biases of keys and values")
            kv = weights.get(f"adapter.kv.{j}.weight")
            if kv is None:  # rows of the packed projection of tokens
                kv = weights[f"{packed}.weight"].rows(config.dim, 3 * config.dim)
            weights[f"projections.{j}.weight"] = kv
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


def not_computed(what: str) -> GraphError:
    """The refusal of a decoder with `what`, which the cells do not compute."""
    return GraphError(
        f"This decoder has {what}, which MindIR exports do not compute",
        hint="export it with --format onnx, or for Ascend chips with --format onnx-atc",
    )


def step_inputs(config: DecoderConfig, *, dtype: str, has_cache: bool, has_sampling: bool) -> tuple[Port, ...]:
    """Inputs of an increment if `has_cache`, else of a prefill. R, S, P and T are dynamic.

    Prefixes of the adapter layers are (R, N, Q, H), and caches of all layers (R, N, P, H).
    """
    heads, size = config.num_heads, config.head_dim
    ports = [
        Port(name=IDS, dtype="int32", shape=(-1, -1)),
        Port(name=POSITIONS, dtype="int32", shape=(-1, -1)),
        Port(name=MASK, dtype="bool", shape=(-1, -1, -1)),
        Port(name=WANTED, dtype="int32", shape=(-1,)),
    ]
    if has_sampling:
        types = ("float32", "float32", "int32", "float32")
        ports += [Port(name=name, dtype=kind, shape=(-1,)) for name, kind in zip(SAMPLING, types, strict=True)]
    prefix, cache = (-1, heads, config.num_queries, size), (-1, heads, -1, size)
    ports += [Port(name=name, dtype=dtype, shape=prefix) for name in layer_ports("prefix", config.num_adapter_layers)]
    if has_cache:
        ports += [Port(name=name, dtype=dtype, shape=cache) for name in layer_ports("cache", config.num_layers)]
    return tuple(ports)
