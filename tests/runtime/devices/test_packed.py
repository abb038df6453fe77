"""Packed linear layers compute the same as plain ones."""

import pytest
import torch
from torch import nn

from llama_adapter.runtime.devices.cpu import PackedLinear, can_pack, pack_linears
from tests.bounds import sums, unit
from tests.llm.toys import toy_decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 7, 48), (3, 1, 48), (0, 48)])
def test_a_packed_layer_equals_the_layer_it_is_made_of(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this machine's oneDNN does not compute in {dtype}")
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype)

    ours, expected = PackedLinear(linear)(x), linear(x)

    assert ours.dtype == dtype
    assert ours.shape == expected.shape
    results = 0.0 if dtype == torch.float32 else 2 * unit(dtype) * expected.double().abs()
    limit = sums(x, linear.weight, linear.bias) + results
    assert bool(((ours.double() - expected.double()).abs() <= limit).all())


def test_only_supported_linear_layers_are_packed() -> None:
    decoder = toy_decoder()
    head, x = decoder.head, torch.randn(decoder.head.in_features, 6).T  # not contiguous
    assert bool(((PackedLinear(head)(x) - head(x)).abs() <= sums(x, head.weight, head.bias)).all())
    embedding, double = decoder.embedding, nn.Linear(4, 4, dtype=torch.float64)

    pack_linears(decoder)
    pack_linears(left := nn.Sequential(double))
    assert not any(isinstance(module, nn.Linear) for module in decoder.modules())
    assert decoder.embedding is embedding
    assert left[0] is double
