"""Runs a decoder of the package transformers, for families that this package does not compute itself."""

# R rows, S new tokens, P positions, G heads of keys and values, H head size, L places with logits, V vocabulary

import inspect
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.async_readback import AsyncReadback
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, Plan, PrefillPlan, Result, ScorePlan, Scores, WarmUp
from llama_adapter.llm.runners.sampler import Prediction, logprobs, predict
from llama_adapter.llm.runners.shapes import padded
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.operators import undisturbed

Past = Sequence[tuple[Tensor, Tensor]]  # keys and values (G, P, H) of each layer; empty before the first token


class ForeignRunner:
    """See `Runner`. There are no pictures, so prefixes are empty.

    Every slot keeps its own keys and values. A step stacks those of its rows behind padding, and takes them apart
    again: a row of a step is [padding, past, new tokens, padding], so that its own positions have no gap. This costs as
    much as transformers' cache, which copies itself for each token too.
    """

    operators_name = "transformers"
    runs_mixed = False

    def __init__(self, model: Any, config: EngineConfig, *, backend: Backend) -> None:
        """`model` is a causal language model of transformers on the backend's device, in `config.dtype`.

        Of `config.decoder`, only vocabulary and context are used. Logits beyond the vocabulary are left out.
        """
        import transformers

        self.config = config
        self.model, self._backend, self._device = model, backend, backend.device
        self._new_cache = transformers.DynamicCache
        self._readback = AsyncReadback(backend, num_slots=config.num_slots)
        self._upload = self._readback.upload
        self._pasts: list[Past] = [()] * config.num_slots
        self._arguments = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in self._arguments else "past_key_values"  # as release 4 calls it

    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        raise NotImplementedError("models of transformers take no pictures")

    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        raise NotImplementedError("models of transformers take no pictures")

    def empty_prefix(self) -> Prefix:
        nothing = torch.zeros(0, 1, 1, 0, 2, device="cpu")
        return Prefix(nothing, nothing)

    def run(self, plan: Plan) -> Result:
        match plan:
            case DecodePlan(rows=[]):
                return self._readback.read()
            case DecodePlan():
                return self._readback.choose(plan, self._decode(plan.positions))
            case PrefillPlan():
                prediction = self._prefill(plan.prompts, first_slot=plan.first_slot)
                return self._readback.choose(plan, prediction, first_slot=plan.first_slot)
            case MixedPlan():
                raise NotImplementedError("transformers runs no mixed plans")
            case ScorePlan():
                questions = zip(plan.prompts, plan.continuations, strict=True)
                return Scores(plan.rows, [self._score(*question) for question in questions])

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self._pasts[target] = self._pasts[source]
        self._readback.move(source, target)

    def clear(self, slot: int, *, position: int | None = None) -> None:
        """Clear the whole slot. A single position needs no clearing: no row reads what is behind its own tokens."""
        if position is None:
            self._pasts[slot] = ()

    def reset(self) -> None:
        self._readback.forget()
        self._pasts = [()] * self.config.num_slots

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        started = time.perf_counter()
        num_slots, longest = self.config.num_slots, min(prompt_tokens, self.config.context - 1)
        self._prefill([[0] * longest] * num_slots, first_slot=0)
        self._decode([longest] * num_slots)
        self.reset()
        self._backend.synchronise()
        return WarmUp(seconds=time.perf_counter() - started, programs=2)

    def _prefill(self, prompts: Sequence[Sequence[int]], *, first_slot: int) -> Prediction:
        ends = [len(prompt) - 1 for prompt in prompts]
        places = sorted(set(ends))
        logits_RLV, pasts = self._step(self._padded(prompts), [()] * len(prompts), ends=ends, places=places)
        self._pasts[first_slot : first_slot + len(prompts)] = pasts
        rows_R, places_R = self._upload(range(len(ends))), self._upload([places.index(end) for end in ends])
        return predict(logits_RLV[rows_R, places_R])

    def _decode(self, positions: Sequence[int]) -> Prediction:
        newest = self._readback.newest(len(positions))
        tokens_R = newest if isinstance(newest, Tensor) else self._upload(newest)
        # A row that has ended, which is not known yet, repeats its last position.
        pasts = [
            [(k_GPH[:, :position], v_GPH[:, :position]) for k_GPH, v_GPH in past]
            for past, position in zip(self._pasts, positions, strict=False)
        ]
        logits_R1V, self._pasts[: len(pasts)] = self._step(tokens_R[:, None], pasts, ends=[0] * len(pasts), places=[0])
        return predict(logits_R1V[:, 0])

    def _score(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[float]:
        """Log-probabilities of continuations. The prompt is computed once for all."""
        end = len(prompt) - 1
        first_11V, [past] = self._step(self._padded([prompt]), [()], ends=[end], places=[end])
        scores: list[float] = []
        for begin in range(0, len(continuations), self.config.num_slots):
            part = continuations[begin : begin + self.config.num_slots]
            rest_RLV = first_11V[:, :0].expand(len(part), -1, -1)
            if (width := max(map(len, part)) - 1) > 0:  # the last token of a continuation predicts nothing
                fed = [continuation[:-1] or continuation for continuation in part]
                ends = [len(ids) - 1 for ids in fed]
                rest_RLV, _ = self._step(self._padded(fed), [past] * len(part), ends=ends, places=range(width))
            for continuation, rest_LV in zip(part, rest_RLV, strict=True):
                logits_TV = torch.cat([first_11V[0], rest_LV[: len(continuation) - 1]])
                scores.append(float(logprobs(logits_TV, self._upload(continuation)).sum()))
        return scores

    @undisturbed
    def _step(
        self, tokens_RS: Tensor, pasts: Sequence[Past], *, ends: Sequence[int], places: Sequence[int]
    ) -> tuple[Tensor, list[Past]]:
        """Feed each row's tokens, up to its place in `ends`, after its past; either all rows have a past, or none.

        Returns float32 logits (R, L, V) of these places of all rows, and pasts that have the tokens too.
        """
        lengths = [past[0][0].shape[1] if past else 0 for past in pasts]
        longest, width = max(lengths), tokens_RS.shape[1]
        cache = self._new_cache()
        for layer, parts in enumerate(zip(*pasts, strict=True)):
            k_RGPH, v_RGPH = (
                torch.stack([pad(part, (0, 0, longest - part.shape[1], 0)) for part in one])
                for one in zip(*parts, strict=True)
            )
            cache.update(k_RGPH, v_RGPH, layer)
        spans = [slice(longest - length, longest + end + 1) for length, end in zip(lengths, ends, strict=True)]
        mask_RP = np.zeros((len(pasts), longest + width), np.int64)
        for row, span in enumerate(spans):
            mask_RP[row, span] = 1
        arguments = {
            "input_ids": tokens_RS,
            "attention_mask": self._upload(mask_RP),
            self._cache_argument: cache,
            "use_cache": True,
            "logits_to_keep": self._upload(list(places)),
        }
        if "position_ids" in self._arguments:
            arguments["position_ids"] = self._upload(np.asarray(lengths)[:, None] + np.arange(width))
        logits_RLV = self.model(**arguments).logits[..., : self.config.decoder.vocab_size].float()
        grown: list[Past] = [
            [(layer.keys[row, :, span], layer.values[row, :, span]) for layer in cache.layers]
            for row, span in enumerate(spans)
        ]
        return logits_RLV, grown

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Ids (R, S) of rows, each padded at its end with its last token."""
        return self._upload(padded(rows, max(map(len, rows))))
