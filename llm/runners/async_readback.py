"""Keeps the newest token of each slot and reads it: at once, or one step late if the device has a queue.

Reading late keeps the device busy: step n + 1 takes its tokens from step n on the device, and the host reads the tokens
of step n while step n + 1 runs. A row that ends in step n is therefore also computed in step n + 1, and the engine
drops that result.
"""

# R rows, K likeliest tokens

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from llama_adapter.llm.runners.base import DecodePlan, PrefillPlan, Tokens, Top
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.sampler import Prediction, choose, likeliest_of, logprobs_of
from llama_adapter.runtime.devices import Backend, Mark
from llama_adapter.runtime.devices.transfer import begin_fetch, upload
from llama_adapter.runtime.ranks import ALONE, Alone

# Rows; their tokens and, if wanted, log-probabilities and likeliest tokens, which are being copied to the host; the
# mark of the copies' end.
Unread = tuple[Sequence[int], Tensor, Tensor | None, tuple[Tensor, Tensor] | None, Mark | None]


class AsyncReadback:
    """Chooses tokens and reads them. At most one step has not been read."""

    def __init__(self, backend: Backend, *, num_slots: int, ranks: Alone = ALONE) -> None:
        """With several ranks, the tokens of the first rank are used by all."""
        self._ranks, self._backend = ranks, backend
        self.upload = functools.partial(upload, device=backend.device)
        self._unread: Unread | None = None  # always None on a device without a queue
        self._newest: list[int] | Tensor = [0] * num_slots  # of each slot; with a queue, on the device
        if backend.capabilities.queued:
            with torch.inference_mode():
                self._newest = self.upload(self._newest)

    def newest(self, num_rows: int) -> list[int] | Tensor:
        """The newest tokens of slots 0..num_rows-1: on the device if it has a queue, else a list."""
        return self._newest[:num_rows]

    def choose(self, plan: PrefillPlan | DecodePlan, prediction: Prediction, *, first_slot: int = 0) -> Tokens:
        """Choose the tokens of a step in slots from `first_slot` on; returns the tokens that are read now.

        These are the tokens of this step or, on a device with a queue, of the previous step.
        """
        slots = slice(first_slot, first_slot + len(plan.rows))
        # On a device with a queue, the host may not know the token that was fed in this decode step.
        newest = None if isinstance(self._newest, list) or isinstance(plan, PrefillPlan) else self._newest[slots]
        draws = self._with_newest(plan)
        ids_R = self._ranks.from_first(choose(prediction, draws, upload=self.upload, newest_R=newest))
        logprobs_R = logprobs_of(ids_R, prediction) if plan.num_logprobs is not None else None
        top_RK = likeliest_of(prediction, plan.num_logprobs) if plan.num_logprobs else None
        if isinstance(self._newest, list):
            token_ids: list[int] = ids_R.tolist()
            self._newest[slots] = token_ids
            return Tokens(plan.rows, token_ids, _numbers(logprobs_R), _pairs(top_RK))
        with torch.inference_mode():
            self._newest[slots] = ids_R.clamp(min=0)  # a row without a token is fed token 0 until the host knows
        on_host = None if logprobs_R is None else begin_fetch(logprobs_R)
        top_on_host = None if top_RK is None else (begin_fetch(top_RK[0]), begin_fetch(top_RK[1]))
        return self.read((plan.rows, begin_fetch(ids_R), on_host, top_on_host, self._backend.mark()))

    def _with_newest(self, plan: PrefillPlan | DecodePlan) -> Sequence[Draw | None]:
        """The draws of a plan. Constrained rows need their newest tokens, which are waited for while the step runs."""
        if self._unread is None or not any(draw and draw.rules and draw.rules.needs_newest for draw in plan.draws):
            return plan.draws
        rows, ids_R, *_, mark = self._unread
        if mark is not None:
            mark.wait()
        newest = dict(zip(rows, ids_R.tolist(), strict=True))
        return [
            draw._replace(rules=draw.rules._replace(answer=(*draw.rules.answer, newest[row]), has_unread=False))
            if draw and draw.rules and draw.rules.needs_newest
            else draw
            for row, draw in zip(plan.rows, plan.draws, strict=True)
        ]

    def read(self, newer: Unread | None = None) -> Tokens:
        """Wait for the tokens of the unread step, and return them. `newer` becomes the unread step."""
        unread, self._unread = self._unread, newer
        if unread is None:
            return Tokens((), ())
        rows, ids_R, logprobs_R, top_RK, mark = unread
        if mark is not None:
            mark.wait()
        return Tokens(rows, ids_R.tolist(), _numbers(logprobs_R), _pairs(top_RK))

    def forget(self) -> None:
        """Drop the unread step without waiting for it."""
        self._unread = None

    def move(self, source: int, target: int) -> None:
        """Copy the newest token of slot `source` to slot `target`."""
        with torch.inference_mode():
            self._newest[target] = self._newest[source]  # type: ignore[assignment]  # a list or a tensor of both


def _numbers(logprobs_R: Tensor | None) -> list[float]:
    return [] if logprobs_R is None else logprobs_R.tolist()


def _pairs(top_RK: tuple[Tensor, Tensor] | None) -> list[Top]:
    if top_RK is None:
        return []
    return [list(zip(*row, strict=True)) for row in zip(*(part.tolist() for part in top_RK), strict=True)]
