"""Chooses the next token from logits, for each row alone.

Greedy, or in this order, which is that of transformers: penalties and constraints, temperature, top-k, top-p, min-p.
"""

# R rows, P penalised rows, C constrained rows, V vocabulary, I token ids, K likeliest tokens, T scored tokens

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llama_adapter.llm.runners.draw import NO_TOKEN, Draw
from llama_adapter.llm.runners.score_layout import ScoreLayout


class Prediction(NamedTuple):
    """The prediction of a step for R rows. The runner's next call may overwrite both tensors."""

    logits_RV: Tensor  # float32
    best_R: Tensor  # int64; NO_TOKEN for rows whose logits are not finite


# Copies numbers to the device, as int64 or float32, and arrays in their own type.
Upload = Callable[[Sequence[int] | Sequence[float] | np.ndarray], Tensor]


def predict(logits_RV: Tensor) -> Prediction:
    """The prediction from float32 logits. It reads nothing from the device, so it may be part of a graph."""
    highest_R, best_R = logits_RV.max(dim=-1)
    # `isfinite`, expressed by operators that every graph compiler supports. A comparison with NaN is False.
    is_finite_R = highest_R.abs() <= torch.finfo(logits_RV.dtype).max
    return Prediction(logits_RV, best_R.where(is_finite_R, NO_TOKEN))


def choose(
    prediction: Prediction, draws: Sequence[Draw | None], *, upload: Upload, newest_R: Tensor | None = None
) -> Tensor:
    """The next token of each row, (R,) int64 on the device; NO_TOKEN for rows whose logits are not finite.

    A row whose draw is None gets its best token. Rows are independent, and nothing is read from the device. `newest_R`
    are the rows' newest tokens, for penalties, if the host does not know them yet.
    """
    sampled = [row for row, draw in enumerate(draws) if draw is not None]
    if not sampled:
        return prediction.best_R
    rows_R = upload(sampled)
    logits_RV = prediction.logits_RV[rows_R].nan_to_num()
    chosen_draws = [draw for draw in draws if draw is not None]
    _penalise(logits_RV, chosen_draws, upload=upload, newest_R=None if newest_R is None else newest_R[rows_R])
    _constrain(logits_RV, chosen_draws, upload=upload)
    drawn_R = _draw(logits_RV, chosen_draws, upload=upload)
    chosen_R = prediction.best_R.index_copy(0, rows_R, drawn_R)
    return chosen_R.where(prediction.best_R != NO_TOKEN, NO_TOKEN)


def _penalise(logits_RV: Tensor, draws: Sequence[Draw], *, upload: Upload, newest_R: Tensor | None) -> None:
    """Apply penalties in place.

    The repetition penalty is that of CTRL and transformers, once for each token of prompt and answer. Presence and
    frequency penalties are OpenAI's, of the tokens of the answer.
    """
    found = [(row, draw.rules) for row, draw in enumerate(draws) if draw.rules is not None and draw.rules.penalises]
    if not found:
        return
    rows, rules = zip(*found, strict=True)
    rows_P = upload(rows)
    counts_PV = _counts([one.answer for one in rules], like=logits_RV, upload=upload)
    unread = [place for place, one in enumerate(rules) if one.has_unread]
    if newest_R is not None and unread:
        unread_I = upload(unread)
        counts_PV[unread_I, newest_R[rows_P[unread_I]]] += 1
    values_PV = logits_RV[rows_P]
    if any(one.repetition != 1.0 for one in rules):
        is_seen_PV = (counts_PV + _counts([one.prompt for one in rules], like=logits_RV, upload=upload)) > 0
        penalty_P1 = upload([one.repetition for one in rules])[:, None]
        penalised_PV = torch.where(values_PV < 0, values_PV * penalty_P1, values_PV / penalty_P1).nan_to_num()
        values_PV = torch.where(is_seen_PV, penalised_PV, values_PV)
    presence_P1, frequency_P1 = (
        upload([getattr(one, of) for one in rules])[:, None] for of in ("presence", "frequency")
    )
    logits_RV[rows_P] = values_PV - frequency_P1 * counts_PV - presence_P1 * (counts_PV > 0)


def _constrain(logits_RV: Tensor, draws: Sequence[Draw], *, upload: Upload) -> None:
    """Set the logits of tokens that a row's constraint does not allow to minus infinity, in place."""
    found = [
        (row, draw.rules.constraint.allowed(draw.rules.answer, logits_RV.shape[-1]))
        for row, draw in enumerate(draws)
        if draw.rules is not None and draw.rules.constraint is not None
    ]
    if found:
        rows, allowed = zip(*found, strict=True)
        rows_C, allowed_CV = upload(rows), upload(np.stack(allowed))
        logits_RV[rows_C] = logits_RV[rows_C].masked_fill(~allowed_CV, -torch.inf)


def _counts(ids: Sequence[Sequence[int]], *, like: Tensor, upload: Upload) -> Tensor:
    """How often each token occurs in each row, (P, V) of the type of `like`."""
    counts_PV = like.new_zeros(len(ids), like.shape[-1])
    pairs = [(row, token) for row, tokens in enumerate(ids) for token in tokens]
    if pairs:
        rows_I, ids_I = (upload(column) for column in zip(*pairs, strict=True))
        counts_PV.index_put_((rows_I, ids_I), counts_PV.new_ones(()), accumulate=True)
    return counts_PV


def logprobs_of(ids_R: Tensor, prediction: Prediction) -> Tensor:
    """Log-probability of each row's token, (R,) float32, before temperature, top-k and top-p. Reads nothing."""
    return logprobs(prediction.logits_RV, ids_R.clamp(min=0))


def logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Log-probabilities (T,) of targets from float32 logits."""
    return logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]


def sum_scores(per_token_T: Tensor, layouts: Sequence[ScoreLayout]) -> list[list[float]]:
    """Log-probabilities of each layout's continuations, from those of all targets in turn.

    Targets after those of the layouts are padding.
    """
    num_targets = sum(len(layout.targets) for layout in layouts)
    on_host_T = per_token_T[:num_targets].cpu()
    parts = iter(torch.split(on_host_T, [length for layout in layouts for length in layout.lengths]))
    return [[float(next(parts).sum()) for _ in layout.lengths] for layout in layouts]


def likeliest_of(prediction: Prediction, num_top: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, (R, K) int64, and their log-probabilities. Reads nothing."""
    logprobs_RK, ids_RK = prediction.logits_RV.log_softmax(dim=-1).topk(min(num_top, prediction.logits_RV.shape[-1]))
    return ids_RK, logprobs_RK


def _draw(logits_RV: Tensor, draws: Sequence[Draw], *, upload: Upload) -> Tensor:
    def column(values: list[float] | list[int]) -> Tensor:
        return upload(values)[:, None]

    top_k = [min(draw.top_k, logits_RV.shape[-1]) for draw in draws]
    probabilities_RV = (logits_RV / column([draw.temperature for draw in draws])).softmax(dim=-1)
    kept_RV, order_RV = kept_in_order(
        probabilities_RV,
        top_p=column([draw.top_p for draw in draws]),
        top_k=column(top_k) if any(top_k) else None,
    )
    if any(draw.min_p for draw in draws):  # dropping tokens does not change the ratio of the others
        kept_RV = kept_RV.masked_fill(kept_RV < column([draw.min_p for draw in draws]) * kept_RV[:, :1], 0.0)
    cumulative_RV = kept_RV.cumsum(dim=-1)
    targets_R1 = column([draw.uniform for draw in draws]) * cumulative_RV[:, -1:]
    places_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True)
    # Rounding may place the target beyond the end. The last kept token is then used.
    places_R1 = torch.minimum(places_R1, (kept_RV > 0).sum(dim=-1, keepdim=True) - 1)
    return order_RV.gather(-1, places_R1)[:, 0]


def kept_in_order(probabilities_RV: Tensor, *, top_p: Tensor, top_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities (R, V) in descending order, with dropped ones set to 0, and the token of each place.

    Top-p works as in the LLaMA reference: a token is dropped if the sum of the probabilities before it exceeds top_p
    (R, 1). Top-k (R, 1) is applied first, and top-p uses the renormalised probabilities.
    """
    sorted_RV, order_RV = probabilities_RV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        places_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
        beyond_k = (top_k > 0) & (places_V >= top_k)
        first_RV = sorted_RV.masked_fill(beyond_k, 0.0)
        sorted_RV = torch.where(top_k > 0, first_RV / first_RV.sum(dim=-1, keepdim=True), sorted_RV)
    before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    return sorted_RV.masked_fill(before_RV > top_p, 0.0), order_RV
