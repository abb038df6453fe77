"""Sums of the log-probabilities of scored continuations."""

# T scored tokens, V vocabulary

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_adapter.llm.runners.score_layout import ScoreLayout


def sum_scores(logits_TV: Tensor, targets_T: Tensor, layouts: Sequence[ScoreLayout]) -> list[list[float]]:
    """Log-probabilities of each layout's continuations, from float32 logits of all targets in turn.

    Targets after those of the layouts are padding.
    """
    per_token_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0].cpu()
    num_targets = sum(len(layout.targets) for layout in layouts)
    parts = iter(torch.split(per_token_T[:num_targets], [length for layout in layouts for length in layout.lengths]))
    return [[float(next(parts).sum()) for _ in layout.lengths] for layout in layouts]
