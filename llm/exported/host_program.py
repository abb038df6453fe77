"""An exported decoder whose graphs return their keys and values: the host keeps the cache."""

from collections.abc import Sequence

import numpy as np

from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.llm.exported.program import DecoderProgram, HostSlots, by_ports, stacked
from llama_adapter.llm.exported.step import Step, score_step
from llama_adapter.llm.model.blocks import Past
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.host import Prediction
from llama_adapter.llm.runners.score_layout import ScoreLayout
from llama_adapter.runtime.graphs.session import GraphSession


class HostProgram(DecoderProgram):
    """See `DecoderProgram`.

    The graphs have dynamic sizes. Each step copies the cache in, and new keys and values out.
    """

    def __init__(
        self,
        card: ExportCard,
        *,
        prefill: GraphSession | None,
        increment: GraphSession,
        prefix: GraphSession | None,
        num_slots: int,
        past: PastKeyValues | None,
    ) -> None:
        """`prefill` runs steps without a cache, `increment` steps with a cache.

        `prefix` is None without adapter layers. Every slot begins with `past`. A past is a cache, so `increment` then
        also runs prompts.

        If `prefill` is None, `increment` also runs prompts, after one cache place that no token attends to. A runtime
        that does not share weights among graphs then has them in memory once.
        """
        self.card, self.name = card, increment.info.name
        self._config, self._dtype = card.config, np.dtype(card.dtype)
        self._prefill, self._increment, self._prefix = prefill, increment, prefix
        self.slots = HostSlots(self._config, num_slots=num_slots, dtype=self._dtype, past=past)

    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        outputs = [] if self._prefix is None else self._prefix.run([visual_query_BQD])
        return stacked(outputs, self._config, num_pictures=len(visual_query_BQD))

    def run(self, step: Step, *, first_slot: int) -> Prediction:
        num_rows, num_tokens = step.ids_RS.shape
        rows = slice(first_slot, first_slot + num_rows)
        prefix = [whole[rows] for whole in self.slots.prefix]
        start = self.slots.start
        if num_tokens > 1 or (step.places_RS == start).all():  # a prompt: only the past is cached
            chosen, new = self._prompt(step, step.mask_RSP[:, :, : start + num_tokens], prefix)
        else:
            # The step's own token is after the cache, not at its place in the cache.
            is_cached_RSP = np.arange(self.slots.capacity) < step.places_RS[:, :, None]
            own_RSS = np.ones((num_rows, 1, 1), bool)
            mask_RSP = np.concatenate([step.mask_RSP & is_cached_RSP, own_RSS], axis=-1)
            cache = [whole[rows] for whole in self.slots.cache]
            chosen, new = self._step(self._increment, step, mask_RSP, [*prefix, *cache])
        self.slots.store(new, step, first_slot=first_slot)
        return chosen

    def score(
        self, layouts: Sequence[ScoreLayout], prefixes: Sequence[Prefix], *, before: Past | None, keeps: bool = False
    ) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        step = score_step(layouts, start=self.slots.start)
        prefix = [part.astype(self._dtype) for part in by_ports(prefixes)]
        return self._prompt(step, step.mask_RSP, prefix)[0].logits_RV, ()

    def close(self) -> None:
        for session in (self._prefill, self._increment, self._prefix):
            if session is not None:
                session.close()

    def _prompt(
        self, step: Step, mask_RSP: np.ndarray, prefix: Sequence[np.ndarray]
    ) -> tuple[Prediction, list[np.ndarray]]:
        """A step whose tokens attend to the past and to each other."""
        slots, start, (num_rows, num_tokens) = self.slots, self.slots.start, step.ids_RS.shape
        if self._prefill is not None and not start:
            return self._step(self._prefill, step, mask_RSP, prefix)
        if not start:  # a cache of one place that no token attends to
            mask_RSP = np.concatenate([np.zeros((num_rows, num_tokens, 1), bool), mask_RSP], axis=-1)
        return self._step(self._increment, step, mask_RSP, [*prefix, *slots.fresh(num_rows, max(start, 1), slots.past)])

    def _step(
        self, graph: GraphSession, step: Step, mask: np.ndarray, state: Sequence[np.ndarray]
    ) -> tuple[Prediction, list[np.ndarray]]:
        """The tokens and logits of a step, and its keys and values."""
        sampling = step.sampling if self.card.has_sampling else ()
        ids_RS = step.ids_RS
        if self.card.picture_format is not None:
            ids_RS, x_RSD = step.embedded(dim=self._config.dim, dtype=self._dtype)
            state = [x_RSD, *state]
        tokens_T, logits_TV, *new = graph.run([ids_RS, step.positions_RS, mask, step.wanted_T, *sampling, *state])
        return Prediction(logits_TV, tokens_T), new
