"""How far apart two computations of the same numbers may be, from the arithmetic and not from one processor.

Processors, libraries and numbers of threads add in different orders. So a number that was seen on one machine is no
bound. There are three that hold on all:

- `spread`: how far a program is from itself in float64. Another program for the same numbers, in the same type, is
  about as far from the exact result (`FACTOR`). A fault of the program under test is in both runs and does not make
  its own spread larger, but is whole in the difference from the other one. It is for whole models.
- `sums`: the error of sums of products is at most n u |x| |w| for n terms and the unit roundoff u, and almost always
  below sqrt(n) u |x| |w|, because roundings have both signs (Higham and Mary, A New Approach to Probabilistic Rounding
  Error Analysis, 2019). It is for single operators.
- `unit`: u, the relative error of one rounding. It is for results that are rounded to a smaller type at the end.

`make processors` runs the tests as several processors compute.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)

# The other program may be three times as far from the exact result as the one that was measured: 3 + 1.
FACTOR = 4


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff: the largest relative error of rounding a number to `dtype`."""
    return torch.finfo(dtype).eps / 2


def largest(tensor: Tensor) -> float:
    """The largest magnitude in a tensor; 0 if it is empty."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors of one shape, computed in float64."""
    assert ours.shape == theirs.shape
    return largest(ours.detach().cpu().double() - theirs.detach().cpu().double())


class Float64(TorchFunctionMode):
    """Inside it, `float()` gives float64, so that a module in float64 computes its norms and softmax in it too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.double if function is Tensor.float else function)(*args, **(kwargs or {}))


def spread(computed: Tensor, exact: Tensor, *others: Tensor) -> float:
    """How far apart two programs may be if one of them gives `computed`, and `exact` in float64.

    A few numbers, or one that is far more sensitive than the rest, may be nearly exact by chance. So there must be
    many, and `others` are results of `jittered` copies, where one is sensitive.
    """
    assert exact.numel() >= 64
    assert bool(exact.isfinite().all())
    return FACTOR * max(unit(computed.dtype) * largest(exact), *(difference(one, exact) for one in (computed, *others)))


def jittered(module: Module, *, seed: int) -> Module:
    """A copy in float32 whose weights are moved by up to one unit roundoff, so that all its sums round differently."""
    draw, moved = torch.Generator().manual_seed(seed), copy.deepcopy(module)
    for weight in moved.parameters():
        weight.data *= 1 + unit(torch.float32) * (2 * torch.rand(weight.shape, generator=draw) - 1)
    return moved


def sums(x: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
    """How far apart two results x (..., F) @ weight (O, F).T may be that are summed in float32, (..., O).

    `others`, such as a bias (O,), are added to the products. The margin is `FACTOR`.
    """
    added = [other.double().abs() for other in others if other is not None]
    magnitudes: Tensor = sum(added, x.double().abs() @ weight.double().abs().T)
    return FACTOR * (weight.shape[1] + len(added)) ** 0.5 * unit(torch.float32) * magnitudes


def rounding_module(module: Module, dtype: torch.dtype) -> Module:
    """A copy that computes in float32 and rounds weights and the output of each part to `dtype`.

    This is the least that a program in `dtype` rounds, so its distance from the exact result is a measure for them.
    """

    def rounded(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.to(dtype).to(output.dtype) if isinstance(output, Tensor) else output

    rounding = copy.deepcopy(module).to(dtype).float()
    for part in rounding.modules():
        part.register_forward_hook(rounded)
    return rounding
