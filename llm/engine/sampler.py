"""From logits to the next token: greedy, temperature, top-k and top-p, drawn from each request's own randomness."""

# R rows, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One row's choice rule, with the uniform number in [0, 1) that decides it."""

    params: SamplingParams
    uniform: float


def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row, None where a row's logits are not finite numbers. Rows do not influence each other.

    One transfer from the device.
    """
    best_R, chosen_R = logits_RV.max(dim=-1)
    is_finite_R = best_R.isfinite()
    sampled = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    if sampled:
        rows = torch.tensor(sampled, device=logits_RV.device)
        chosen_R[rows] = _draw(logits_RV[rows].nan_to_num(), [draws[row] for row in sampled])
    token_ids: list[int] = chosen_R.where(is_finite_R, -1).tolist()
    return [None if token_id < 0 else token_id for token_id in token_ids]


def _draw(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    def column(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, device=logits_RV.device)[:, None]

    probabilities_RV = (logits_RV / column([draw.params.temperature for draw in draws])).softmax(dim=-1)
    kept_RV, order_RV = _kept_in_order(
        probabilities_RV,
        top_p=column([draw.params.top_p for draw in draws]),
        top_k=column([min(draw.params.top_k, logits_RV.shape[-1]) for draw in draws]),
    )
    cumulative_RV = kept_RV.cumsum(dim=-1)
    targets_R1 = column([draw.uniform for draw in draws]) * cumulative_RV[:, -1:]
    places_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True)
    # Rounding may put the target at the very end: stay on the last token that was kept.
    places_R1 = torch.minimum(places_R1, (kept_RV > 0).sum(dim=-1, keepdim=True) - 1)
    return order_RV.gather(-1, places_R1)[:, 0]


def _kept_in_order(probabilities_RV: Tensor, *, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities from best to worst, those that are dropped set to 0, and the token of each place."""
    sorted_RV, order_RV = probabilities_RV.sort(dim=-1, descending=True, stable=True)
    places_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
    beyond_k = (top_k > 0) & (places_V >= top_k)
    if bool((top_k > 0).any()):
        sorted_RV = sorted_RV.masked_fill(beyond_k, 0.0)
        sorted_RV = sorted_RV / sorted_RV.sum(dim=-1, keepdim=True)
    before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    return sorted_RV.masked_fill(before_RV > top_p, 0.0), order_RV


def kept_distribution(probabilities_RV: Tensor, *, top_p: float, top_k: int = 0) -> Tensor:
    """The distribution that is drawn from, (R, V) in vocabulary order and in the type that came.

    Top-p as the LLaMA reference: a token is dropped when the sum of the probabilities strictly before it exceeds
    top_p. Top-k comes first, and top-p then counts what it left, renormalised.
    """
    device = probabilities_RV.device
    kept_RV, order_RV = _kept_in_order(
        probabilities_RV, top_p=torch.tensor([[top_p]], device=device), top_k=torch.tensor([[top_k]], device=device)
    )
    kept_RV = kept_RV / kept_RV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(kept_RV).scatter(-1, order_RV, kept_RV)
