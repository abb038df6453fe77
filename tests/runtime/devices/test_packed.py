"""Packed linear layers compute what plain ones do."""

import pytest
import torch
from torch import nn

from llama_adapter.runtime.devices.packed import PackedLinear, can_pack, pack_linears
from tests.llm.toys import toy_decoder

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
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
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=0)


def test_a_packed_layer_takes_views_that_are_not_contiguous() -> None:
    linear = nn.Linear(48, 80).requires_grad_(False)
    x = torch.randn(48, 6).T

    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=0)


def test_all_linear_layers_of_a_decoder_are_packed_and_nothing_else() -> None:
    decoder = toy_decoder()
    num_linear = sum(isinstance(module, nn.Linear) for module in decoder.modules())
    embedding = decoder.embedding

    assert pack_linears(decoder) == num_linear
    assert not any(isinstance(module, nn.Linear) for module in decoder.modules())
    assert decoder.embedding is embedding
    assert pack_linears(decoder) == 0


def test_types_that_onednn_lacks_stay_plain() -> None:
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))

    assert not can_pack(torch.float64)
    assert pack_linears(module) == 0
    assert isinstance(module[0], nn.Linear)
