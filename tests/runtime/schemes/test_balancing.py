"""Norms and the weights after them are balanced: the function is bitwise the same, without outliers between them."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from llama_adapter.runtime.schemes.balancing import balanced, balancing_factors, read_norms
from llama_adapter.runtime.schemes.state import quantise
from llama_adapter.vision.block import Block
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder

NORMS = {"norm": "linear"}


def parts(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A norm and a layer with 64 inputs: one is an outlier, one is dead, and one is not read."""
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(64), nn.Linear(64, 48)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
        for tensor, factor in ((norm.weight, 100.0), (norm.bias, 100.0), (linear.weight.T, 0.01)):
            tensor[3] *= factor
        norm.weight[4], norm.bias[4], linear.weight[:, 5] = 0.0, 0.0, 0.0
    return {
        f"{name}.{part}": tensor.detach().to(dtype)
        for name, module in (("norm", norm), ("linear", linear))
        for part, tensor in module.named_parameters()
    }


def balance(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return dict(balanced(state.items(), NORMS, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_channel_and_its_column_change_by_the_same_power_of_two(dtype: torch.dtype) -> None:
    state = parts(dtype)
    after = balance(state, dtype)

    factors = after["linear.weight"].T[:, 0] / state["linear.weight"].float().T[:, 0]
    factors[5] = 1.0  # 0 / 0 gives NaN
    assert set(factors.tolist()) <= {2.0**exponent for exponent in range(-10, 11)}
    assert factors[3] in (64, 128)
    assert factors[4] == 1
    assert torch.equal(after["linear.weight"], state["linear.weight"].float() * factors)
    for name in ("norm.weight", "norm.bias"):
        assert after[name].dtype == dtype
        assert torch.equal(after[name].float() * factors, state[name].float())
    assert torch.equal(after["linear.bias"], state["linear.bias"])


def test_norms_of_1_over_equal_columns_stay_the_same_tensors() -> None:
    state = parts()
    state |= {"norm.weight": torch.ones(64), "norm.bias": torch.zeros(64), "linear.weight": torch.randn(48, 64)}

    after = balance(state, torch.float32)

    assert all(after[name] is tensor for name, tensor in state.items())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("name", ["norm.weight", "norm.bias", "linear.weight"])
def test_numbers_that_balancing_cannot_keep_stay_as_they_are(name: str, value: float) -> None:
    state = parts()
    state[name].view(-1)[7] = value

    after = balance(state, torch.float32)

    assert torch.equal(after[name].view(-1)[7], state[name].view(-1)[7]) or value != value
    for part in state:
        assert torch.equal(after[part].isfinite(), state[part].isfinite())


def test_a_channel_that_float16_could_not_hold_stays() -> None:
    weight, columns = torch.ones(8), torch.ones(4, 8)
    weight[0], columns[:, 0] = 2.0**-12, 1e-12  # a factor of 2^14 would lose bits that float16 can hold
    weight[0] *= 1 + 2.0**-10

    wide = balancing_factors(weight, torch.zeros(8), columns, dtype=torch.float32)
    narrow = balancing_factors(weight, torch.zeros(8), columns, dtype=torch.float16)

    assert wide[0] > 2**11
    assert narrow[0] == 1


def test_a_norm_waits_for_its_layer_and_nothing_else_does() -> None:
    state, taken = parts(), []

    def source() -> Iterator[tuple[str, Tensor]]:
        for name in ("norm.weight", "other", "norm.bias", "linear.bias", "linear.weight", "last"):
            taken.append(name)
            yield name, state.get(name, torch.ones(1))

    passed = balanced(source(), NORMS, dtype=torch.float32)

    assert [next(passed)[0] for _ in range(3)] == ["other", "linear.bias", "norm.weight"]
    assert taken[-1] == "linear.weight"
    assert [name for name, _ in passed] == ["norm.bias", "linear.weight", "last"]


def test_a_norm_without_its_layer_is_given_as_it_is() -> None:
    state = {"norm.weight": torch.full((64,), 3.0)}

    assert balance(state, torch.float32) == state


def test_every_norm_of_the_encoder_that_one_layer_reads_is_balanced() -> None:
    with torch.device("meta"):
        encoder = PictureEncoder(
            VisionConfig(
                clip=ClipConfig(image_size=56, patch_size=14, width=64, num_layers=1, num_heads=2, output_dim=48),
                query=QueryConfig(num_queries=3, width=96, depth=1, num_heads=2, mlp_dim=160, output_dim=32),
            )
        )

    assert read_norms(encoder) == {
        **{f"{half}.blocks.0.norm1": f"{half}.blocks.0.attention.qkv" for half in ("clip", "query")},
        **{f"{half}.blocks.0.norm2": f"{half}.blocks.0.mlp.up" for half in ("clip", "query")},
        "clip.post_norm": "clip.projection",
    }


def test_floats_are_not_balanced() -> None:
    block = Block(64, num_heads=1, hidden_dim=64, activation="quick_gelu")
    state = block.state_dict()
    state["norm1.weight"][3] = 100.0

    plain = dict(quantise(state.items(), block, dtype=torch.float32, precision="float"))

    assert all(torch.equal(plain[name], tensor) for name, tensor in state.items())
