"""The row of a prompt with its continuations, and the sums of their scores."""

# T scored tokens, V vocabulary

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ScoreLayout(NamedTuple):
    """A row of a prompt and, behind it, its continuations.

    Each continuation attends to the prompt and to itself, at positions that go on from the prompt's end. Its last token
    predicts nothing that is scored, so it is not fed.
    """

    prompt_length: int
    token_ids: list[int]  # all that is fed
    spans: list[range]  # of each continuation, the places of its fed tokens in the row
    predictors: list[int]  # of all continuations' tokens in turn, the places whose logits predict them
    targets: list[int]  # these tokens
    lengths: list[int]  # of each continuation


def lay_out(prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> ScoreLayout:
    """The row of a prompt and its continuations, of at least one token each."""
    layout = ScoreLayout(len(prompt), list(prompt), [], [], [], [len(continuation) for continuation in continuations])
    for continuation in continuations:
        start = len(layout.token_ids)
        layout.token_ids.extend(continuation[:-1])
        layout.spans.append(range(start, len(layout.token_ids)))
        layout.predictors.extend([len(prompt) - 1, *layout.spans[-1]])
        layout.targets.extend(continuation)
    return layout


def sum_scores(logits_TV: Tensor, targets_T: Tensor, layouts: Sequence[ScoreLayout]) -> list[list[float]]:
    """Log-probability of each layout's continuations, from float32 logits of all targets in turn.

    Targets behind those of the layouts are padding.
    """
    per_token_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0].cpu()
    num_targets = sum(len(layout.targets) for layout in layouts)
    parts = iter(torch.split(per_token_T[:num_targets], [length for layout in layouts for length in layout.lengths]))
    return [[float(next(parts).sum()) for _ in layout.lengths] for layout in layouts]
