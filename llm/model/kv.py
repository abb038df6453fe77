"""Keys and values of earlier tokens: the slots, and the views of them that prefills and decode steps use.

The decoder calls a view's `update` once per layer, and attends to the keys and values that it returns.
"""

# L layers, B rows, N heads of keys and values, S step tokens, P positions, H head size, C past tokens,
# T blocks of a row

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.past import PastKeyValues
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


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU, the pages take memory and time only when they are written, so unused slots cost nothing."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


class KVCache:
    """Blocks at fixed addresses: k and v are (L, blocks, N, places, H).

    Slot s has block s, which begins with the past, if there is one. A row that fills it gets spare blocks, so that rows
    take memory by their length (Kwon et al., 2023). As long as no row does, every step can use a view: rows in use are
    always slots 0..n-1.
    """

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
        self.block, device = block or config.context, torch.device(device)
        self.is_paged = self.block < config.context
        # With spare blocks, there is one more. What padding writes beyond its row is put there, and never read.
        num_blocks = num_slots + (spare_blocks + 1 if self.is_paged else 0)
        shape = (config.num_layers, num_blocks, config.num_kv_heads, self.block, config.head_dim)
        # Zeros, not uninitialised memory: masked places are multiplied by 0, which does not remove a NaN.
        self.k, self.v = (_zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._extra: list[list[int]] = [[] for _ in range(num_slots)]  # blocks of each slot, without its own
        self._spare = list(range(num_blocks - 2, num_slots - 1, -1))
        # The blocks of each slot. Its own one stands for those that it lacks: a masked place must be finite.
        most = -(-config.context // self.block)
        self.table_BT = torch.arange(num_slots, device=device)[:, None].repeat(1, most)
        self.past: Past | None = None
        self.start = 0
        if past is not None:
            k_LNCH, v_LNCH = (torch.from_numpy(part).to(device, dtype) for part in past.parts)
            self.past, self.start = (k_LNCH, v_LNCH), len(past)
            self.k[:, :num_slots, :, : self.start] = k_LNCH[:, None]
            self.v[:, :num_slots, :, : self.start] = v_LNCH[:, None]

    def hold(self, num_places: Sequence[int], *, first_slot: int = 0) -> None:
        """Let slots from `first_slot` on have blocks for so many places each, and take those of later slots back.

        Blocks that are not there are left out. This happens in warm-ups only: the scheduler counts them.
        """
        if not self.is_paged:
            return
        wanted = [-(-count // self.block) - 1 for count in num_places]
        wanted += [0] * (len(self._extra) - first_slot - len(wanted))
        changed = [slot for slot, count in enumerate(wanted, first_slot) if count != len(self._extra[slot])]
        for slot in changed:
            while len(self._extra[slot]) > wanted[slot - first_slot]:
                self._spare.append(self._extra[slot].pop())
        for slot in changed:
            while len(self._extra[slot]) < wanted[slot - first_slot] and self._spare:
                self._extra[slot].append(self._spare.pop())
        self._update_table(changed)

    def _update_table(self, changed: Sequence[int]) -> None:
        """Write the blocks of these slots into the table."""
        if changed:
            slots, most = range(min(changed), max(changed) + 1), self.table_BT.shape[1]
            rows = [(self.blocks_of(slot) + [slot] * most)[:most] for slot in slots]
            self.table_BT[slots.start : slots.stop] = torch.tensor(rows)

    def blocks_of(self, slot: int) -> list[int]:
        """The blocks of a slot, in the order of their places."""
        return [slot, *self._extra[slot]]

    def written_blocks(self, slots: slice | Tensor, number: int) -> slice | Tensor:
        """Where new rows are written: block `number` of each slot, or the block that is never read if it has none."""
        if number == 0:
            return slots
        blocks_B, own_B = self.table_BT[slots, number], self.table_BT[slots, 0]
        return blocks_B.where(blocks_B != own_B, self.k.shape[1] - 1)

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

    def move(self, source: int, target: int, *, num_places: int) -> None:
        """Replace slot `target` by the first `num_places` places of slot `source`."""
        for whole in (self.k, self.v):
            whole[:, target, :, :num_places] = whole[:, source, :, :num_places]
        if self._extra[source] or self._extra[target]:
            self._spare += self._extra[target]
            self._extra[target], self._extra[source] = self._extra[source], []
            self._update_table([source, target])

    def clear(self, slot: int, *, place: int | None = None) -> None:
        """Set a slot after the past, or one of its places, to zero."""
        blocks = self.blocks_of(slot)
        for whole in (self.k, self.v):
            if place is None:
                whole[:, slot, :, self.start :] = 0
                for block in blocks[1:]:
                    whole[:, block] = 0
            elif place // self.block < len(blocks):  # else it went along with a row that moved
                whole[:, blocks[place // self.block], :, place % self.block] = 0

    def read(self, slot: int, *, num_places: int) -> Past:
        """A copy of the first places of a slot."""
        parts = ([part for part, _ in self._parts(whole, slot, num_places)] for whole in (self.k, self.v))
        k_LNCH, v_LNCH = (torch.cat(part, dim=2) for part in parts)
        return k_LNCH, v_LNCH

    def write(self, slot: int, values: Past) -> None:
        """Write the first places of a slot, which must have the blocks for them."""
        for whole, new_LNCH in zip((self.k, self.v), values, strict=True):
            for part, places in self._parts(whole, slot, new_LNCH.shape[2]):
                part[:] = new_LNCH[:, :, places]

    def _parts(self, whole: Tensor, slot: int, num_places: int) -> Iterator[tuple[Tensor, slice]]:
        """Views of the first places of a slot, (L, N, P, H), one for each block, and which places they are."""
        for number, first in enumerate(range(0, num_places, self.block)):
            places = slice(first, min(first + self.block, num_places))
            yield whole[:, self.blocks_of(slot)[number], :, : places.stop - first], places
