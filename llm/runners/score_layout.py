"""The row of a prompt with its continuations: which token attends to which, at which position. Imports no torch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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


def lay_out_rows(
    prompt: Sequence[int], continuations: Sequence[Sequence[int]], *, most_tokens: int
) -> list[ScoreLayout]:
    """One row or several: as many continuations in each as fit in `most_tokens`, in their order, and at least one."""
    groups: list[list[Sequence[int]]] = []
    for continuation in continuations:
        if not groups or len(lay_out(prompt, [*groups[-1], continuation]).token_ids) > most_tokens:
            groups.append([])
        groups[-1].append(continuation)
    return [lay_out(prompt, group) for group in groups]


def layout_positions(layout: ScoreLayout, *, start: int = 0) -> list[int]:
    """The position of each fed token, from `start`: every continuation goes on from the prompt's end."""
    end = start + layout.prompt_length
    positions = list(range(start, end))
    for span in layout.spans:
        positions.extend(range(end, end + len(span)))
    return positions


def layout_mask(layout: ScoreLayout, width: int, *, start: int = 0) -> np.ndarray:
    """(S, start + S) bool for a row padded to `width`: every token attends to the `start` tokens in front of the row.

    Padding attends to itself, so that its softmax is defined.
    """
    owners = np.full(width, -2)  # the continuation that each token belongs to, -1 for the prompt
    owners[: layout.prompt_length] = -1
    for index, span in enumerate(layout.spans):
        owners[span.start : span.stop] = index
    visible: np.ndarray = (owners[None, :] == -1) | (owners[None, :] == owners[:, None])
    return np.concatenate([np.ones((width, start), bool), visible & np.tri(width, dtype=bool)], axis=1)
