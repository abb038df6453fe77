"""Keys and values of past tokens: the slots, and the views of them that prefills and decode steps use.

The decoder calls a view's `update` once per layer and attends to what it returns.
"""

# L layers, B rows, N heads, S step tokens, P positions, H head size

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.operators import StoreFunction, store


class KVView(Protocol):
    """Stores the keys and values of a forward pass, and says which ones it attends to."""

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's keys and values; return those to attend to, (B, N, P, H) each."""


class NoCache:
    """Stores nothing: a forward pass attends to its own tokens. For training and scoring."""

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        return k_BNSH, v_BNSH


class PrefillView:
    """New rows, written from position 0; they attend to their own tokens.

    A single row of keys and values, (1, N, S, H), is written to all rows.
    """

    def __init__(self, k_LBNPH: Tensor, v_LBNPH: Tensor) -> None:
        self._k, self._v = k_LBNPH, v_LBNPH

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens = k_BNSH.shape[2]
        self._k[layer, :, :, :num_tokens] = k_BNSH
        self._v[layer, :, :, :num_tokens] = v_BNSH
        return k_BNSH, v_BNSH


LayerViews = Sequence[tuple[Tensor, Tensor]]  # k and v of each layer, (B, N, context, H)


class DecodeView:
    """Running rows, one token each at its position; they attend to positions 0..length-1."""

    def __init__(self, layers: LayerViews, *, positions_B: Tensor, length: int, store: StoreFunction = store) -> None:
        self._layers, self._positions, self._length, self._store = layers, positions_B, length, store

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        k_BNPH, v_BNPH = self._layers[layer]
        self._store(k_BNPH, self._positions, k_BNSH)
        self._store(v_BNPH, self._positions, v_BNSH)
        return k_BNPH[:, :, : self._length], v_BNPH[:, :, : self._length]


class KVCache:
    """Slots at fixed addresses: k and v are (L, slots, N, context, H).

    Rows in use are always slots 0..n-1, so that every step uses a view.
    """

    def __init__(
        self, config: DecoderConfig, *, num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (config.num_layers, num_slots, config.num_heads, config.context, config.head_dim)
        # Zeros, not empty memory: a masked place is multiplied by 0, which does not remove a NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def prefill_view(self, first: int, num_rows: int) -> PrefillView:
        """Slots first..first+num_rows-1, for new rows."""
        rows = slice(first, first + num_rows)
        return PrefillView(self.k[:, rows], self.v[:, rows])

    def layers(self, num_rows: int) -> LayerViews:
        """Slots 0..num_rows-1 of each layer, for decode steps.

        They are inputs of a graph: compilers copy slices that the graph takes itself.
        """
        return [(k[:num_rows], v[:num_rows]) for k, v in zip(self.k.unbind(), self.v.unbind(), strict=True)]

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of slot `source` over slot `target`."""
        self.k[:, target, :, :num_tokens] = self.k[:, source, :, :num_tokens]
        self.v[:, target, :, :num_tokens] = self.v[:, source, :, :num_tokens]
