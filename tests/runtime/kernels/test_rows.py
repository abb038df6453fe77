"""Norm and gated activation for training, forward and backward, equal torch's with every instruction set."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.llm.training.operators import row_rms_norm, row_swiglu
from llama_adapter.runtime.kernels.library import Library
from tests.bounds import FACTOR, difference, largest, unit

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(dtype)


def is_near(ours: Tensor, expected: Tensor) -> None:
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    # A sum over the row, and about ten operations; then the result is rounded.
    computed = FACTOR * (ours.shape[-1] ** 0.5 + 10) * unit(torch.float32)
    rounded = 0.0 if ours.dtype == torch.float32 else 2 * unit(ours.dtype)
    assert difference(ours, expected) <= (computed + rounded) * largest(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 96, 171])
def test_swiglu_and_its_gradient(width: int, dtype: torch.dtype, library: Library) -> None:
    gate_up, grad = drawn(40, 2 * width, dtype=dtype), drawn(40, width, dtype=dtype)
    exact = gate_up.float().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.float())

    is_near(row_swiglu(library, gate_up, None), expected.detach().to(dtype))
    is_near(row_swiglu(library, gate_up, grad), expected_grad.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 96, 171])
def test_rms_norm_and_its_gradient(width: int, dtype: torch.dtype, library: Library) -> None:
    x, grad, weight = drawn(8, 5, width, dtype=dtype), drawn(8, 5, width, dtype=dtype) + 1, drawn(width, dtype=dtype)
    exact, inverse = x.float().requires_grad_(), torch.empty(8, 5, 1)
    expected = F.rms_norm(exact, (width,), weight.float(), EPS)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.float())

    is_near(row_rms_norm(library, x, None, weight, inverse, EPS), expected.detach().to(dtype))
    if width > 1:  # with a width of 1 the gradient is 0 except for eps
        is_near(row_rms_norm(library, x, grad, weight, inverse, EPS), expected_grad.to(dtype))
