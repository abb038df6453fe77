"""Keys and values of earlier tokens: the slots, and the views of them that prefills and decode steps use.

The decoder calls a view's `update` once per layer, and attends to the keys and values that it returns.
"""

# L layers, B rows, N heads of keys and values, S step tokens, P positions, H head size, C past tokens,
# T blocks of a row

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.blocks import Blocks, lazy_zeros
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.runtime.devices.transfer import upload
from llama_adapter.runtime.operators import StoreFunction, store

Past = tuple[Tensor, Tensor]  # keys and values of C tokens before others, (L, N, C, H) each


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


class Recorder(NoCache):
    """As `NoCache`, and remembers the keys and values of the tokens."""

    def __init__(self, past: Past | None) -> None:
        super().__init__(past)
        self._layers: list[tuple[Tensor, Tensor]] = []

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().update(layer, k_BNSH, v_BNSH)
        self._layers.append((k, v))
        return k, v

    def read(self, row: int, num_places: int) -> Past:
        """A copy of the first places of a row, the past included. A single row stands for all."""
        k, v = (
            [whole[min(row, len(whole) - 1), :, :num_places] for whole in part]
            for part in zip(*self._layers, strict=True)
        )
        return torch.stack(k), torch.stack(v)


class PrefillView:
    """New rows, written after the past. They attend to the past and to their own tokens.

    A single row of keys and values, (1, N, S, H), is written to all rows.
    """

    def __init__(self, cache: "KVCache", slots: slice | Tensor) -> None:
        """`slots` are a slice or ids (B,)."""
        self._cache, self._slots, self._own = cache, slots, NoCache(cache.past)

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        start, block = self._cache.start, self._cache.block
        stop = start + k_BNSH.shape[2]
        for number, first in enumerate(range(0, stop, block)):
            blocks = self._cache.written_blocks(self._slots, number)
            here, end = max(start, first), min(stop, first + block)
            for whole, new_BNSH in ((self._cache.k, k_BNSH), (self._cache.v, v_BNSH)):
                whole[layer][blocks, :, here - first : end - first] = new_BNSH[:, :, here - start : end - start]
        return self._own.update(layer, k_BNSH, v_BNSH)

    def positions(self, positions_BS: Tensor) -> Tensor:
        return self._own.positions(positions_BS)


def _behind(past_NCH: Tensor, own_BNSH: Tensor) -> Tensor:
    """The past followed by the row's own keys or values, (B, N, C + S, H)."""
    return torch.cat([past_NCH.expand(len(own_BNSH), -1, -1, -1), own_BNSH], dim=2)


LayerViews = Sequence[tuple[Tensor, Tensor]]  # k and v of each layer, (B, N, places, H), or of all blocks


class DecodeView:
    """Rows that go on, with tokens at their positions. They attend to positions 0..length-1.

    If a row may need several blocks, its keys and values are gathered from them.
    """

    def __init__(
        self,
        layers: LayerViews,
        table_BT: Tensor | None = None,
        *,
        positions_BS: Tensor,
        length: int,
        store: StoreFunction = store,
    ) -> None:
        """The first two are those of `KVCache.layers`."""
        self._layers, self._positions_BS, self._length = layers, positions_BS, length
        self._store, self._table_BT = store, table_BT

    def update(self, layer: int, k_BNSH: Tensor, v_BNSH: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (self._updated(*both) for both in zip(self._layers[layer], (k_BNSH, v_BNSH), strict=True))
        return k, v

    def _updated(self, whole: Tensor, new_BNSH: Tensor) -> Tensor:
        """Keys or values (B, N, P, H) with the new ones."""
        if self._table_BT is None and new_BNSH.shape[2] == 1:
            self._store(whole, self._positions_BS[:, 0], new_BNSH)
            return whole[:, :, : self._length]
        block, blocks_BS = whole.shape[2], torch.arange(len(new_BNSH), device=whole.device)[:, None]
        if self._table_BT is not None:
            blocks_BS = self._table_BT[blocks_BS, self._positions_BS // block]
        whole[blocks_BS, :, self._positions_BS % block] = new_BNSH.transpose(1, 2)
        if self._table_BT is None:
            return whole[:, :, : self._length]
        # One copy, of whole heads of blocks, in the order in which the places of a row are neighbours.
        num_heads, read_BT = whole.shape[1], self._table_BT[:, : -(-self._length // block)]
        heads_BNT = read_BT[:, None] * num_heads + torch.arange(num_heads, device=whole.device)[:, None]
        gathered = functional.embedding(heads_BNT, whole.view(-1, block * whole.shape[3]))
        return gathered.view(len(read_BT), num_heads, -1, whole.shape[3])[:, :, : self._length]

    def positions(self, positions_BS: Tensor) -> Tensor:
        return torch.arange(self._length, device=positions_BS.device)[None]


class KVCache(Blocks):
    """Blocks on a device, and the views of them that programs use."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        past: PastKeyValues | None = None,
        block: int = 0,
        spare_blocks: int = 0,
    ) -> None:
        """`block` and `spare_blocks` are those of `EngineConfig`."""
        super().__init__(config.context, num_slots=num_slots, block=block, spare_blocks=spare_blocks)
        self._device = torch.device(device)
        shape = (config.num_layers, self.num_blocks, config.num_kv_heads, self.block, config.head_dim)
        # Zeros, not uninitialised memory: masked places are multiplied by 0, which does not remove a NaN.
        if self._device.type == "cpu":
            bits = np.dtype(f"u{dtype.itemsize}")
            self.k, self.v = (torch.from_numpy(lazy_zeros(shape, bits)).view(dtype) for _ in range(2))
        else:
            self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.begin(None if past is None else (self._uploaded(past.k_LNCH, dtype), self._uploaded(past.v_LNCH, dtype)))

    def _uploaded(self, part: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(part).to(self._device, dtype)

    def as_table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return upload(rows, self._device)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=2)

    def written_blocks(self, slots: slice | Tensor, number: int) -> slice | Tensor:
        """Where new rows are written: block `number` of each slot, or the block that is never read if it has none."""
        if number == 0:
            return slots
        blocks_B, own_B = self.table_BT[slots, number], self.table_BT[slots, 0]
        written_B: Tensor = blocks_B.where(blocks_B != own_B, self.k.shape[1] - 1)
        return written_B

    def prefill_view(self, slots: slice | Tensor) -> PrefillView:
        """The slots, a slice or ids, for new rows."""
        return PrefillView(self, slots)

    def layers(self, slots: slice, *, length: int) -> tuple[LayerViews, Tensor | None]:
        """For steps that attend to `length` places: the slots' own blocks of each layer, and None, if these suffice.

        Otherwise all blocks, and those of each slot, (B, T). They are inputs of a graph, because compilers copy slices
        that are taken inside a graph.
        """
        pairs = zip(self.k.unbind(), self.v.unbind(), strict=True)
        if length > self.block:
            return list(pairs), self.table_BT[slots]
        return [(k[slots], v[slots]) for k, v in pairs], None
