"""The blocks of a cache of keys and values, in arrays of numpy or tensors of torch. Imports no torch."""

# L layers, B slots, N heads of keys and values, P positions, H head size, C past tokens, T blocks of a row

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Past = tuple[Any, Any]  # keys and values of C tokens, (L, N, C, H) each


class Blocks(ABC):
    """Blocks at fixed addresses: k and v are (L, blocks, N, places, H).

    Slot s has block s, which begins with the past, if there is one. A row that fills it gets spare blocks, so that rows
    take memory by their length (Kwon et al., 2023). As long as no row does, every step can use a view: rows in use are
    always slots 0..n-1.
    """

    def __init__(self, context: int, *, num_slots: int, block: int = 0, spare_blocks: int = 0) -> None:
        """`block` and `spare_blocks` are those of `EngineConfig`. Subclasses make `k` and `v`."""
        self.block = block or context
        self.is_paged = self.block < context
        # With spare blocks, there is one more. What padding writes beyond its row is put there, and never read.
        self.num_blocks = num_slots + (spare_blocks + 1 if self.is_paged else 0)
        self._num_slots = num_slots
        self._extra: list[list[int]] = []  # blocks of each slot, without its own
        self._spare: list[int] = []
        self._most = -(-context // self.block)
        self.past: Past | None = None
        self.start = 0
        self.k: Any
        self.v: Any
        self.table_BT: Any

    @abstractmethod
    def as_table(self, rows: Sequence[Sequence[int]]) -> Any:
        """Rows of the table (B, T), int64."""

    @abstractmethod
    def joined(self, parts: Sequence[Any]) -> Any:
        """A copy of consecutive places, (L, N, P, H) each, as one."""

    def begin(self, past: Past | None) -> None:
        """Write the past into every slot. There is memory for all of them, as `k` and `v` are made."""
        self._extra = [[] for _ in range(self._num_slots)]
        self._spare = list(range(self.num_blocks - 2, self._num_slots - 1, -1))
        self.table_BT = self.as_table(self._table(range(len(self._extra))))
        if past is not None:
            self.past, self.start = past, past[0].shape[2]
            for whole, part_LNCH in zip((self.k, self.v), past, strict=True):
                whole[:, : len(self._extra), :, : self.start] = part_LNCH[:, None]

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

    def _table(self, slots: Sequence[int]) -> list[list[int]]:
        """The blocks of slots. Their own one stands for those that they lack: a masked place must be finite."""
        return [(self.blocks_of(slot) + [slot] * self._most)[: self._most] for slot in slots]

    def _update_table(self, changed: Sequence[int]) -> None:
        """Write the blocks of these slots into the table."""
        if changed:
            slots = range(min(changed), max(changed) + 1)
            self.table_BT[slots.start : slots.stop] = self.as_table(self._table(slots))

    def blocks_of(self, slot: int) -> list[int]:
        """The blocks of a slot, in the order of their places."""
        return [slot, *self._extra[slot]]

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
        k_LNCH, v_LNCH = (
            self.joined([part for part, _ in self._parts(whole, slot, num_places)]) for whole in (self.k, self.v)
        )
        return k_LNCH, v_LNCH

    def write(self, slot: int, values: Past) -> None:
        """Write the first places of a slot, which must have the blocks for them."""
        for whole, new_LNCH in zip((self.k, self.v), values, strict=True):
            for part, places in self._parts(whole, slot, new_LNCH.shape[2]):
                part[:] = new_LNCH[:, :, places]

    def _parts(self, whole: Any, slot: int, num_places: int) -> Iterator[tuple[Any, slice]]:
        """Views of the first places of a slot, (L, N, P, H), one for each block, and which places they are."""
        for number, first in enumerate(range(0, num_places, self.block)):
            places = slice(first, min(first + self.block, num_places))
            yield whole[:, self.blocks_of(slot)[number], :, : places.stop - first], places


class ArrayBlocks(Blocks):
    """Blocks in numpy. Numbers are float32, or the bits of bfloat16, uint16."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, context: int, *, num_slots: int, **blocks: int) -> None:
        """`shape` is (L, N, H), and `blocks` are as in `Blocks`."""
        super().__init__(context, num_slots=num_slots, **blocks)
        num_layers, num_heads, head_dim = shape
        whole = (num_layers, self.num_blocks, num_heads, self.block, head_dim)
        self.k, self.v = (lazy_zeros(whole, dtype) for _ in range(2))

    def as_table(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        return np.array(rows, np.int64)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=2)


def lazy_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros whose pages take memory and time only when they are written, so that unused slots cost nothing."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mmap.mmap(-1, max(count * dtype.itemsize, 1)), dtype, count=count).reshape(shape)
