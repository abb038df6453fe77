"""`sampler.py` in numpy: chooses tokens, and computes log-probabilities. Imports no torch."""

# T rows, V vocabulary

from collections.abc import Sequence
from typing import Final

import numpy as np

from llama_adapter.llm.runners.draw import NO_TOKEN, Draw, Rules

_LEAST: Final = np.float32(1e-4)  # of the largest probability: what other tokens have is seldom needed
_MARGIN: Final = 1e-3  # more than the rounding of a sum


def choose(logits_TV: np.ndarray, draws: Sequence[Draw | None]) -> list[int]:
    """The next token of each row from float32 logits. A row whose draw is None gets its best token.

    NO_TOKEN for rows whose logits are not finite.
    """
    return [_choose(logits_V, draw) for logits_V, draw in zip(logits_TV, draws, strict=True)]


@np.errstate(all="ignore")
def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    """Log-probabilities (T, V), float32."""
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    logprobs: np.ndarray = shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))
    return logprobs


def likeliest(logprobs_V: np.ndarray, num_top: int) -> list[tuple[int, float]]:
    """The likeliest tokens with their log-probabilities, the likeliest first."""
    last = min(num_top, len(logprobs_V)) - 1
    candidates = np.flatnonzero(-logprobs_V <= np.partition(-logprobs_V, last)[last])  # sorting all takes longer
    best = candidates[np.argsort(-logprobs_V[candidates], kind="stable")][:num_top]
    return list(zip(best.tolist(), logprobs_V[best].tolist(), strict=True))


@np.errstate(over="ignore", under="ignore")
def _choose(logits_V: np.ndarray, draw: Draw | None) -> int:
    if not np.isfinite(logits_V.max()):
        return NO_TOKEN
    if draw is None:
        return int(logits_V.argmax())
    logits_V = np.nan_to_num(logits_V)
    if draw.rules is not None:
        _apply(draw.rules, logits_V)
    scaled_V = logits_V / np.float32(draw.temperature)
    probabilities_V = np.exp(scaled_V - scaled_V.max())
    probabilities_V /= probabilities_V.sum()
    order_V = _likeliest_first(probabilities_V, share=1.0 if draw.top_k else draw.top_p)
    sorted_V = probabilities_V[order_V]
    if draw.top_k:
        sorted_V[draw.top_k :] = 0
        sorted_V /= sorted_V.sum()
    before_V = np.cumsum(sorted_V) - sorted_V
    kept_V = np.where(before_V > np.float32(draw.top_p), np.float32(0), sorted_V)
    kept_V = np.where(kept_V < np.float32(draw.min_p) * kept_V[0], np.float32(0), kept_V)
    cumulative_V = np.cumsum(kept_V)
    place = int(np.searchsorted(cumulative_V, np.float32(draw.uniform) * cumulative_V[-1], side="right"))
    # Rounding may place the target beyond the end. The last kept token is then used.
    return int(order_V[min(place, int((kept_V > 0).sum()) - 1)])


def _likeliest_first(probabilities_V: np.ndarray, *, share: float) -> np.ndarray:
    """Tokens, the likeliest first: at least as many as have this share together.

    Few tokens mostly have it, and sorting only them takes a fraction of the time.
    """
    front = np.flatnonzero(probabilities_V >= _LEAST * probabilities_V.max())
    if probabilities_V[front].sum() > share + _MARGIN:
        return front[np.argsort(-probabilities_V[front], kind="stable")]
    return np.argsort(-probabilities_V, kind="stable")


def _apply(rules: Rules, logits_V: np.ndarray) -> None:
    """Apply penalties and the constraint in place."""
    seen = np.array(sorted({*rules.prompt, *rules.answer}), np.int64)
    values = logits_V[seen]
    penalised = np.where(values < 0, values * rules.repetition, values / rules.repetition)
    logits_V[seen] = np.nan_to_num(penalised)
    counts_V = np.bincount(np.array(rules.answer, np.int64), minlength=len(logits_V)).astype(np.float32)
    logits_V -= np.float32(rules.frequency) * counts_V
    logits_V -= np.float32(rules.presence) * (counts_V > 0)
    if rules.constraint is not None:
        logits_V[~rules.constraint.allowed(rules.answer, len(logits_V))] = -np.inf
