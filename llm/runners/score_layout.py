"""The layout of a prompt and its continuations in one row: positions, and which token attends to which.

Imports no torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llama_adapter.llm.prefix import PictureTokens


class ScoreLayout(NamedTuple):
    """A row with a prompt followed by its continuations.

    Each continuation attends to the prompt and to itself, at positions that continue from the prompt's end. Its last
    token is not fed, because it does not predict a scored token.
    """

    prompt_length: int
    token_ids: list[int]  # all tokens that are fed
    spans: list[range]  # for each continuation, the places of its fed tokens in the row
    predictors: list[int]  # for each token of all continuations in turn, the place whose logits predict it
    targets: list[int]  # the tokens of all continuations in turn
    lengths: list[int]  # number of tokens of each continuation
    pictures: Sequence[PictureTokens] = ()  # of the prompt


def lay_out(
    prompt: Sequence[int], continuations: Sequence[Sequence[int]], pictures: Sequence[PictureTokens] = ()
) -> ScoreLayout:
    """The row of a prompt and its continuations, which have at least one token each."""
    lengths = [len(continuation) for continuation in continuations]
    layout = ScoreLayout(len(prompt), list(prompt), [], [], [], lengths, pictures)
    for continuation in continuations:
        start = len(layout.token_ids)
        layout.token_ids.extend(continuation[:-1])
        layout.spans.append(range(start, len(layout.token_ids)))
        layout.predictors.extend([len(prompt) - 1, *layout.spans[-1]])
        layout.targets.extend(continuation)
    return layout


def lay_out_rows(
    prompt: Sequence[int],
    continuations: Sequence[Sequence[int]],
    pictures: Sequence[PictureTokens] = (),
    *,
    most_tokens: int,
) -> list[ScoreLayout]:
    """One or more rows. Each has as many continuations, in their order, as fit `most_tokens`, and at least one."""
    groups: list[list[Sequence[int]]] = []
    for continuation in continuations:
        if not groups or len(lay_out(prompt, [*groups[-1], continuation]).token_ids) > most_tokens:
            groups.append([])
        groups[-1].append(continuation)
    return [lay_out(prompt, group, pictures) for group in groups]


def layout_positions(layout: ScoreLayout, *, start: int = 0) -> list[int]:
    """The position of each fed token, beginning at `start`. Every continuation begins after the prompt's end."""
    end = start + layout.prompt_length
    positions = list(range(start, end))
    for span in layout.spans:
        positions.extend(range(end, end + len(span)))
    return positions


def layout_mask(layout: ScoreLayout, width: int, *, start: int = 0) -> np.ndarray:
    """The attention mask, bool (S, start + S), of a row padded to S = `width`.

    Every token attends to the `start` tokens before the row. Padding attends to itself, so that its softmax is defined.
    """
    owners = np.full(width, -2)  # the continuation that each token belongs to, -1 for the prompt
    owners[: layout.prompt_length] = -1
    for index, span in enumerate(layout.spans):
        owners[span.start : span.stop] = index
    visible: np.ndarray = (owners[None, :] == -1) | (owners[None, :] == owners[:, None])
    return np.concatenate([np.ones((width, start), bool), visible & np.tri(width, dtype=bool)], axis=1)
