"""Keys and values of earlier tokens: the slots, and the views of them that prefills and decode steps use.

The decoder calls a view's `update` once per layer, and attends to the keys and values that it returns.
"""

# L layers, B rows, N heads of keys and values, S step tokens, P positions, H head size, C past tokens

import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.runtime.operators import StoreFunction, store

Past = tuple[Tensor, Tensor]  # keys and values before every prompt, (L, N, C, H) each


class KVView(Protocol):
    """Stores the keys and values of a forward pass, and returns those that it attends to."""

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's keys and values; return those to attend to, (B, N, P, H) each."""

    def positions(self, positions_BS: Tensor) -> Tensor:
        """The positions of the keys to attend to, (B, P), of a step whose tokens are at `positions_BS`. B may be 1."""


class NoCache:
    """Stores nothing: a forward pass attends to its own tokens, and to a past. For training and scoring."""

    def __init__(self, past: Past | None = None) -> None:
        self._past = past

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        if self._past is None:
            return k_BNSH, v_BNSH
        return _behind(self._past[0][layer], k_BNSH), _behind(self._past[1][layer], v_BNSH)

    def positions(self, positions_BS: Tensor) -> Tensor:
        if self._past is None:
            return positions_BS
        past_C = torch.arange(self._past[0].shape[2], device=positions_BS.device)
        return torch.cat([past_C.expand(len(positions_BS), -1), positions_BS], dim=1)


class PrefillView:
    """New rows, written after the past. They attend to the past and to their own tokens.

    A single row of keys and values, (1, N, S, H), is written to all rows.
    """

    def __init__(self, cache: "KVCache", slots: slice | Tensor) -> None:
        """`slots` are a slice or ids (B,)."""
        self._k, self._v, self._slots, self._own = cache.k, cache.v, slots, NoCache(cache.past)
        self._start = 0 if cache.past is None else cache.past[0].shape[2]

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        places = slice(self._start, self._start + k_BNSH.shape[2])
        self._k[layer][self._slots, :, places] = k_BNSH
        self._v[layer][self._slots, :, places] = v_BNSH
        return self._own.update(layer, k_BNSH, v_BNSH)

    def positions(self, positions_BS: Tensor) -> Tensor:
        return self._own.positions(positions_BS)


def _behind(past_NCH: Tensor, own_BNSH: Tensor) -> Tensor:
    """The past followed by the row's own keys or values, (B, N, C + S, H)."""
    return torch.cat([past_NCH.expand(len(own_BNSH), -1, -1, -1), own_BNSH], dim=2)


LayerViews = Sequence[tuple[Tensor, Tensor]]  # k and v of each layer, (B, N, context, H)


class DecodeView:
    """Running rows, with one token each at its position. They attend to positions 0..length-1."""

    def __init__(self, layers: LayerViews, *, positions_B: Tensor, length: int, store: StoreFunction = store) -> None:
        self._layers, self._positions, self._length, self._store = layers, positions_B, length, store

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        k_BNPH, v_BNPH = self._layers[layer]
        self._store(k_BNPH, self._positions, k_BNSH)
        self._store(v_BNPH, self._positions, v_BNSH)
        return k_BNPH[:, :, : self._length], v_BNPH[:, :, : self._length]

    def positions(self, positions_BS: Tensor) -> Tensor:
        return torch.arange(self._length, device=positions_BS.device)[None]


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU, the pages take memory and time only when they are written, so unused slots cost nothing."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


class KVCache:
    """Slots at fixed addresses: k and v are (L, slots, N, context, H). Each slot begins with the past, if there is one.

    Rows in use are always slots 0..n-1, so that every step can use a view.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        past: PastKeyValues | None = None,
    ) -> None:
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.context, config.head_dim)
        # Zeros, not uninitialised memory: masked places are multiplied by 0, which does not remove a NaN.
        self.k, self.v = (_zeros(shape, dtype=dtype, device=torch.device(device)) for _ in range(2))
        self.past: Past | None = None
        self._start = 0
        if past is not None:
            k_LNCH, v_LNCH = (torch.from_numpy(part).to(device, dtype) for part in past.parts)
            self.past, self._start = (k_LNCH, v_LNCH), len(past)
            self.k[:, :, :, : self._start] = k_LNCH[:, None]
            self.v[:, :, :, : self._start] = v_LNCH[:, None]

    def prefill_view(self, slots: slice | Tensor) -> PrefillView:
        """The slots, a slice or ids, for new rows."""
        return PrefillView(self, slots)

    def layers(self, num_rows: int) -> LayerViews:
        """Slots 0..num_rows-1 of each layer, for decode steps.

        They are inputs of a graph, because compilers copy slices that are taken inside a graph.
        """
        return [(k[:num_rows], v[:num_rows]) for k, v in zip(self.k.unbind(), self.v.unbind(), strict=True)]

    def move(self, source: int, target: int, *, num_places: int) -> None:
        """Copy the first `num_places` places of slot `source` over slot `target`."""
        for whole in (self.k, self.v):
            whole[:, target, :, :num_places] = whole[:, source, :, :num_places]

    def clear(self, slot: int, *, place: int | None = None) -> None:
        """Set a slot after the past, or one of its places, to zero."""
        places = slice(self._start, None) if place is None else place
        for whole in (self.k, self.v):
            whole[:, slot, :, places] = 0
