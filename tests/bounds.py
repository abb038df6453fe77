"""How far apart two computations of the same numbers may be, from the arithmetic and not from one processor.

Processors, libraries and numbers of threads add in different orders. So a number that was seen on one machine is no
bound. There are three that hold on all:

- `spread`: the distance of a program from itself in float64. Two programs for the same numbers, in the same type, are
  both about that far from the exact result (`FACTOR`). A fault of the program under test cancels in its own spread and
  is whole in the difference from the other program. It is for whole models.
- `sums`: the error of sums of products, at most `n u |x| |w|` for n terms and unit roundoff u, and almost always below
  `sqrt(n) u |x| |w|` because roundings have both signs (Higham and Mary, A New Approach to Probabilistic Rounding
  Error Analysis, 2019). It is for single operators.
- `unit`: the relative error of one rounding, for numbers that are copied, or computed in float32 and then rounded.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The other program may be three times as far from the exact result as the one that was measured: 3 + 1.
FACTOR = 4


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff: the largest relative error of rounding a number to `dtype`."""
    return torch.finfo(dtype).eps / 2


def largest(tensor: Tensor) -> float:
    """The largest magnitude in a tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors of one shape, computed in float64."""
    assert ours.shape == theirs.shape
    return largest(ours.detach().cpu().double() - theirs.detach().cpu().double())


class Float64(TorchFunctionMode):
    """Inside it, `float()` gives float64, so that a module in float64 computes its norms and softmax in it too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.double if function is Tensor.float else function)(*args, **(kwargs or {}))


def spread(computed: Tensor, exact: Tensor) -> float:
    """How far two programs may be apart of which one gave `computed`, and `exact` in float64."""
    assert bool(exact.isfinite().all())
    return FACTOR * max(difference(computed, exact), unit(computed.dtype) * largest(exact))


def sums(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    """How far two results (..., O) of x (..., F) @ weight (O, F).T may be apart, each summed in float32.

    `others` are added after the products and broadcast, such as a bias (O,).
    """
    magnitudes = x.double().abs() @ weight.double().abs().T
    for other in others:
        magnitudes = magnitudes + other.double().abs()
    return 2 * FACTOR * (weight.shape[1] + len(others)) ** 0.5 * unit(torch.float32) * magnitudes
