"""From logits to the next token: greedy, temperature, top-k and top-p, drawn from each request's own randomness."""

# R rows, V vocabulary

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.runners.prediction import NO_TOKEN, Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One row's choice rule, with the uniform number in [0, 1) that decides it."""

    params: SamplingParams
    uniform: float


Upload = Callable[[Sequence[int] | Sequence[float]], Tensor]  # numbers to the device, int64 or float32


def choose(prediction: Prediction, draws: Sequence[Draw], *, upload: Upload) -> Tensor:
    """The next token of each row, (R,) int64 on the device; NO_TOKEN where a row's logits are not finite numbers.

    Rows do not influence each other, and nothing is read from the device.
    """
    sampled = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    if not sampled:
        return prediction.best_R
    rows_R = upload(sampled)
    drawn_R = _draw(prediction.logits_RV[rows_R].nan_to_num(), [draws[row] for row in sampled], upload=upload)
    chosen_R = prediction.best_R.index_copy(0, rows_R, drawn_R)
    return chosen_R.where(prediction.best_R != NO_TOKEN, NO_TOKEN)


def _draw(logits_RV: Tensor, draws: Sequence[Draw], *, upload: Upload) -> Tensor:
    def column(values: list[float] | list[int]) -> Tensor:
        return upload(values)[:, None]

    top_k = [min(draw.params.top_k, logits_RV.shape[-1]) for draw in draws]
    probabilities_RV = (logits_RV / column([draw.params.temperature for draw in draws])).softmax(dim=-1)
    kept_RV, order_RV = _kept_in_order(
        probabilities_RV,
        top_p=column([draw.params.top_p for draw in draws]),
        top_k=column(top_k) if any(top_k) else None,
    )
    cumulative_RV = kept_RV.cumsum(dim=-1)
    targets_R1 = column([draw.uniform for draw in draws]) * cumulative_RV[:, -1:]
    places_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True)
    # Rounding may put the target at the very end: stay on the last token that was kept.
    places_R1 = torch.minimum(places_R1, (kept_RV > 0).sum(dim=-1, keepdim=True) - 1)
    return order_RV.gather(-1, places_R1)[:, 0]


def _kept_in_order(probabilities_RV: Tensor, *, top_p: Tensor, top_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities from best to worst, those that are dropped set to 0, and the token of each place."""
    sorted_RV, order_RV = probabilities_RV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        places_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
        beyond_k = (top_k > 0) & (places_V >= top_k)
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
        probabilities_RV,
        top_p=torch.tensor([[top_p]], device=device),
        top_k=torch.tensor([[top_k]], device=device) if top_k else None,
    )
    kept_RV = kept_RV / kept_RV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(kept_RV).scatter(-1, order_RV, kept_RV)
