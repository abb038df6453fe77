"""Sums of the log-probabilities of scored continuations."""

# T scored tokens, V vocabulary

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_adapter.llm.runners.score_layout import ScoreLayout


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
