"""What a step says of the next token: the logits, and the best token of each row, found on the device beside them."""

# R rows, V vocabulary

from typing import NamedTuple

import torch
from torch import Tensor

NO_TOKEN = -1


class Prediction(NamedTuple):
    """Of R rows; both may be overwritten by the executor's next call."""

    logits_RV: Tensor  # float32
    best_R: Tensor  # int64, NO_TOKEN where a row's logits are not finite numbers


def predict(logits_RV: Tensor) -> Prediction:
    """The prediction of float32 logits; nothing is read from the device, so it may stand inside a graph."""
    highest_R, best_R = logits_RV.max(dim=-1)
    # What `isfinite` means, in operators that every graph compiler takes; a comparison with NaN is False.
    is_finite_R = highest_R.abs() <= torch.finfo(logits_RV.dtype).max
    return Prediction(logits_RV, best_R.where(is_finite_R, NO_TOKEN))
