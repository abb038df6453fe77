"""Packs rows of different lengths, so that layers compute only the tokens that the loss depends on, and no padding."""

# B rows, S places of a padded row, T tokens of all rows together, L labelled positions

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # label of a position that does not count


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The mapping between padded rows and packed tokens, in both directions. Indices are int64."""

    num_rows: int
    length: int  # places of a padded row
    from_padded_T: Tensor  # index in the flattened padded rows of each token
    to_padded: Tensor  # (B * S): index of the token at each place; padding refers to the first token
    labelled_L: Tensor  # tokens whose next token has a label
    row_L: Tensor  # row of each of them
    target_L: Tensor  # label of each of them

    @property
    def place_T(self) -> Tensor:
        """The position of each token in its row."""
        return self.from_padded_T % self.length

    def pad(self, x: Tensor) -> Tensor:
        """(T, ...) -> (B, S, ...). No token reads the values in padding."""
        padded: Tensor = _Pad.apply(x, self.to_padded, self.from_padded_T)  # type: ignore[no-untyped-call]
        return padded.view(self.num_rows, self.length, *x.shape[1:])

    def pack(self, padded: Tensor) -> Tensor:
        """(B, S, ...) -> (T, ...)."""
        return padded.flatten(0, 1).index_select(0, self.from_padded_T)


def layout_of(tokens_BS: Tensor, labels_BS: Tensor) -> Layout:
    """The layout of rows that begin at their first column. A row ends at its last position that predicts a label."""
    columns_S = torch.arange(tokens_BS.shape[1], device=labels_BS.device)
    last_B1 = (columns_S * (labels_BS != IGNORED)).amax(1, keepdim=True)
    is_kept_BS = columns_S < last_B1.clamp(min=1)
    length = int(last_B1.amax().clamp(min=1))
    labels_BS, is_kept_BS = labels_BS[:, : length + 1], is_kept_BS[:, :length]
    number_BS = is_kept_BS.flatten().cumsum(0).sub_(1).view_as(is_kept_BS)
    targets_BS = labels_BS[:, 1:]
    row_L, column_L = (targets_BS != IGNORED).nonzero(as_tuple=True)
    return Layout(
        num_rows=len(tokens_BS),
        length=length,
        from_padded_T=is_kept_BS.flatten().nonzero().squeeze(1),
        to_padded=number_BS.where(is_kept_BS, 0).flatten(),
        labelled_L=number_BS[row_L, column_L],
        row_L=row_L,
        target_L=targets_BS[row_L, column_L],
    )


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_padded: Tensor, from_padded_T: Tensor) -> Tensor:
        ctx.save_for_backward(from_padded_T)
        return x.index_select(0, to_padded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (from_padded_T,) = ctx.saved_tensors
        return grad.index_select(0, from_padded_T), None, None  # no gradient comes from padding
