"""Runners that compute with arrays of numpy and choose tokens on the host. Imports no torch."""

# A adapter layers, B pictures, Q queries, N heads, H head size, D model width, R rows, V vocabulary

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import (
    DecodePlan,
    MixedPlan,
    Plan,
    PrefillPlan,
    Result,
    ScorePlan,
    Scores,
    Tokens,
    WarmUp,
)
from llama_adapter.llm.runners.beginnings import Beginnings
from llama_adapter.llm.runners.numpy_sampler import choose, likeliest, log_softmax
from llama_adapter.llm.runners.score_layout import ScoreLayout


class Prediction(NamedTuple):
    """The prediction of a step for R rows. The runner's next call may overwrite both arrays."""

    logits_RV: np.ndarray  # float32
    best_R: np.ndarray  # integers; the token of a drawn row if it was drawn already; NO_TOKEN if logits are not finite


class HostRunner(ABC):
    """See `Runner`. Tokens are read in the step that chooses them."""

    has_sampling = False  # whether plain draws are made by `predict`

    def __init__(self, config: EngineConfig, *, dtype: np.dtype) -> None:
        """`dtype` is that of prefixes."""
        self.config = config
        self._dtype = dtype
        self._start = config.past_length  # place at which prompts begin
        self._newest = [0] * config.num_slots  # token of each slot
        self._beginnings = Beginnings()
        self._heads = slice(config.decoder.heads.start, config.decoder.heads.stop)  # this rank's among those of all

    @abstractmethod
    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        """Visual queries -> prefix (A, B, N, Q, H)."""

    @abstractmethod
    def predict(self, plan: PrefillPlan | DecodePlan | MixedPlan) -> Prediction:
        """The predictions after the newest token, or the prompt, of each row of a plan."""

    @abstractmethod
    def score(self, plan: ScorePlan) -> list[list[float]]:
        """Log-probability of each continuation of each row."""

    @abstractmethod
    def clear(self, slot: int, *, position: int | None = None) -> None:
        """See `Runner.clear`."""

    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        whole = self.project(as_array(visual_query_BQD).astype(self._dtype))
        return [Prefix(whole.k[:, row : row + 1], whole.v[:, row : row + 1]) for row in range(len(visual_query_BQD))]

    def empty_prefix(self) -> Prefix:
        shape = self.config.decoder.prefix_shape(1)
        return Prefix(np.zeros(shape, self._dtype), np.zeros(shape, self._dtype))

    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        return Prefix(*(part[:, None, self._heads].astype(self._dtype) for part in (k_ANQH, v_ANQH)))

    def run(self, plan: Plan) -> Result:
        if isinstance(plan, ScorePlan):
            return Scores(plan.rows, self.score(plan))
        if not plan.rows:
            return Tokens((), ())
        prediction = self.predict(plan)
        token_ids = self._agreed(self._chosen(plan, prediction))
        first_slot = plan.first_slot if isinstance(plan, PrefillPlan) else 0
        self._newest[first_slot : first_slot + len(token_ids)] = [max(token, 0) for token in token_ids]
        if plan.num_logprobs is None:
            return Tokens(plan.rows, token_ids)
        logprobs_RV = log_softmax(prediction.logits_RV)
        own_R = logprobs_RV[np.arange(len(token_ids)), np.maximum(token_ids, 0)]
        top = [likeliest(logprobs_V, plan.num_logprobs) for logprobs_V in logprobs_RV] if plan.num_logprobs else ()
        return Tokens(plan.rows, token_ids, own_R.tolist(), top)

    def _chosen(self, plan: PrefillPlan | DecodePlan | MixedPlan, prediction: Prediction) -> list[int]:
        token_ids: list[int] = prediction.best_R.tolist()
        for row, draw in enumerate(plan.draws):
            if draw is not None and not (draw.is_plain and self.has_sampling):
                [token_ids[row]] = choose(prediction.logits_RV[row : row + 1], [draw])
        return token_ids

    def _agreed(self, token_ids: list[int]) -> list[int]:
        """The tokens that all ranks use."""
        return token_ids

    def reset(self) -> None:
        for slot in range(self.config.num_slots):
            self.clear(slot)
        self._beginnings.clear()

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        started = time.perf_counter()
        num_slots, context = self.config.num_slots, self.config.context
        longest = min(prompt_tokens + new_tokens, context)
        rows, greedy = range(num_slots), [None] * num_slots
        prompts, prefixes = [(0,) * min(prompt_tokens, context)] * num_slots, [self.empty_prefix()] * num_slots
        self.run(PrefillPlan(rows, prompts, prefixes, greedy, first_slot=0))
        self.run(DecodePlan(rows, [longest - 1] * num_slots, greedy))
        self.reset()
        return WarmUp(seconds=time.perf_counter() - started, programs=2)


def as_array(numbers: Any) -> np.ndarray:
    """An array, or the numbers of a tensor in float32."""
    array: np.ndarray = numbers if isinstance(numbers, np.ndarray) else numbers.float().cpu().numpy()
    return array


def scores_of(logits_TV: np.ndarray, layouts: Sequence[ScoreLayout]) -> list[list[float]]:
    """Log-probabilities of each layout's continuations, from the logits that predict all their tokens in turn."""
    targets = [token for layout in layouts for token in layout.targets]
    per_token = iter(log_softmax(logits_TV)[np.arange(len(targets)), targets])
    return [[float(sum(next(per_token) for _ in range(length))) for length in layout.lengths] for layout in layouts]
