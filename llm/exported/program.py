"""The interface of the runner to an exported decoder's graphs, and the arrays that hold keys and values."""

# A adapter layers, R rows, S step tokens, N heads, G heads of keys and values, H head size, Q queries, D width,
# B pictures, T wanted tokens, V vocabulary

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.llm.exported.step import Step, num_prefix_layers
from llama_adapter.llm.model.blocks import Past
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.host import Prediction
from llama_adapter.llm.runners.score_layout import ScoreLayout

LEAST_CAPACITY = 64  # places of a new cache; the number is doubled when a row needs more


class DecoderProgram(ABC):
    """The graphs of a decoder, with slots for the keys, values and prefixes of rows. Not thread-safe."""

    card: ExportCard
    name: str  # the runtime of the graphs, for people
    slots: "HostSlots"
    keeps_prompts = False  # whether it runs the rest of a prompt whose beginning is in its slot

    @abstractmethod
    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        """Visual queries -> prefix (A, B, N, Q, H)."""

    @abstractmethod
    def run(self, step: Step, *, first_slot: int) -> Prediction:
        """Run a step of slots from `first_slot` on, and store its keys and values at its places.

        Returns the logits of the wanted tokens, and the tokens that the draws of the step choose.
        """

    @abstractmethod
    def score(
        self, layouts: Sequence[ScoreLayout], prefixes: Sequence[Prefix], *, before: Past | None, keeps: bool = False
    ) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """Logits (T, V) of the predictors of rows at temporary places after `before`. Uses no slot.

        With `keeps`, also returns the cache (R, G, P, H) of these places, in the order of the ports. Only a program
        that `keeps_prompts` takes it, and another `before` than the past of its slots.
        """

    @abstractmethod
    def close(self) -> None:
        """Release memory, device and process. May be repeated."""


class HostSlots:
    """Keys, values and prefixes of all slots in numpy, in the order of the graph's ports.

    Rows are the first dimension, so that consecutive slots are contiguous in memory.
    """

    def __init__(self, config: DecoderConfig, *, num_slots: int, dtype: np.dtype, past: PastKeyValues | None) -> None:
        """Every slot begins with `past`."""
        self._config, self.dtype = config, dtype
        self.past: Past | None = None
        if past is not None:
            k_LGCH, v_LGCH = past.parts
            self.past = k_LGCH.astype(dtype), v_LGCH.astype(dtype)
        self.start = 0 if past is None else len(past)
        # Current number of places of a slot. The mask of a step must have this number of places.
        self.capacity = max(min(LEAST_CAPACITY, config.context), self.start)
        shape = (num_slots, config.num_heads, config.num_queries, config.head_dim)
        self.prefix = [np.zeros(shape, dtype) for _ in range(2 * num_prefix_layers(config))]
        self.cache = self.fresh(num_slots, self.capacity, self.past)

    def reserve(self, num_places: int) -> None:
        """Enlarge every slot to at least `num_places` places. Their content is kept."""
        if num_places <= self.capacity:
            return
        capacity = self.capacity
        while capacity < num_places:
            capacity = min(2 * capacity, max(self._config.context, num_places))
        older = self.cache
        self.cache = []
        for number in range(len(older)):  # one at a time, so that the peak is one cache and one array
            fresh = np.zeros((*older[number].shape[:2], capacity, older[number].shape[3]), self.dtype)
            fresh[:, :, : self.capacity] = older[number]
            older[number] = fresh
        self.cache, self.capacity = older, capacity

    def place(self, prefixes: Sequence[Prefix], *, first_slot: int) -> None:
        """Copy prefixes, (A, 1, N, Q, H) each, into slots from `first_slot` on."""
        for slot, prefix in enumerate(prefixes, start=first_slot):
            for layer in range(num_prefix_layers(self._config)):
                self.prefix[2 * layer][slot] = prefix.k[layer, 0]
                self.prefix[2 * layer + 1][slot] = prefix.v[layer, 0]

    def store(self, new: Sequence[np.ndarray], step: Step, *, first_slot: int) -> None:
        """Write a step's keys and values (R, G, S, H), in the order of the ports, to its places."""
        num_rows, num_tokens = step.places_RS.shape
        rows = np.arange(first_slot, first_slot + num_rows)
        if num_tokens > 1:  # a prompt
            places = slice(self.start, self.start + num_tokens)
            for whole, part in zip(self.cache, new, strict=True):
                whole[first_slot : first_slot + num_rows, :, places] = part
            return
        for whole, part in zip(self.cache, new, strict=True):
            whole[rows, :, step.places_RS[:, 0]] = part[:, :, 0]

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        """Copy the prefix and the first `num_tokens` places of slot `source` over slot `target`."""
        for whole in self.cache:
            whole[target, :, :num_tokens] = whole[source, :, :num_tokens]
        for whole in self.prefix:
            whole[target] = whole[source]

    def clear(self, slot: int) -> None:
        """Set a slot to zero, except the past."""
        for whole in self.cache:
            whole[slot, :, self.start :] = 0
        for whole in self.prefix:
            whole[slot] = 0

    def write(self, slot: int, values: Past) -> None:
        """Write the first places of a slot."""
        _write([whole[slot] for whole in self.cache], values)

    def fresh(self, num_rows: int, num_places: int, before: Past | None) -> list[np.ndarray]:
        """A new cache (R, G, P, H) for each port, which has `before` followed by zeros."""
        config = self._config
        shape = (num_rows, config.num_kv_heads, num_places, config.head_dim)
        made = [np.zeros(shape, self.dtype) for _ in range(2 * config.num_layers)]
        if before is not None:
            _write(made, before)
        return made


def read_past(cache: Sequence[np.ndarray], row: int, num_places: int) -> Past:
    """A copy of the first places of a row of a cache that is in the order of the ports."""
    k_LGCH, v_LGCH = (np.stack([whole[row, :, :num_places] for whole in cache[first::2]]) for first in (0, 1))
    return k_LGCH, v_LGCH


def _write(cache: Sequence[np.ndarray], values: Past) -> None:
    """Write the first places of one row, (G, P, H) for each port, or of all rows, (R, G, P, H)."""
    for first, part_LGCH in enumerate(values):
        for whole, part_GCH in zip(cache[first::2], part_LGCH, strict=True):
            whole[..., : part_GCH.shape[1], :] = part_GCH


def by_ports(prefixes: Sequence[Prefix]) -> list[np.ndarray]:
    """Prefixes (A, 1, N, Q, H) of rows in the form of the graph's ports: (R, N, Q, H) for each layer's k and v."""
    layers = range(len(prefixes[0].k) if prefixes[0].k.size else 0)
    return [np.concatenate([getattr(prefix, part)[layer] for prefix in prefixes]) for layer in layers for part in "kv"]


def stacked(arrays: Sequence[np.ndarray], config: DecoderConfig, *, num_pictures: int) -> Prefix:
    """The outputs of the prefix graph as one prefix (A, B, N, Q, H)."""
    if not arrays:
        shape = config.prefix_shape(num_pictures)
        return Prefix(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    return Prefix(np.stack(arrays[0::2]), np.stack(arrays[1::2]))
