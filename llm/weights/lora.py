"""Merging low-rank updates into the matrices they belong to. Arithmetic in float32; no file names here."""

from torch import Tensor


def low_rank_update(l1: Tensor, l2: Tensor) -> Tensor:
    """The matrix that y += L2 (L1 x) adds to its layer: L2 @ L1 in float32, with scale 1.

    `l1` is (rank, in), `l2` (out, rank), of any floating type.
    """
    return l2.float() @ l1.float()
