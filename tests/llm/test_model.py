"""The decoder's mathematics compared with a naive float64 loop, and its ways of running compared with each other."""

import math
from dataclasses import replace

import pytest
import torch

from llama_adapter.llm.model.kv import DecodeView, KVCache
from llama_adapter.runtime.operators import adapter_attention, causal_attention, rotary_table, rotate
from tests.bounds import Float64, difference, unit
from tests.llm.toys import CONFIG, forward, rounding, toy_decoder, toy_visual_queries


def test_attention_with_prefix_equals_a_naive_float64_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=draw).double() for _ in range(3))
    adapter_k, gated_v = (torch.randn(1, 2, 3, 8, generator=draw).double() for _ in range(2))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with Float64():
        ours = causal_attention(q, k, v, mask) + adapter_attention(q, adapter_k, gated_v)
    for head in range(2):
        for row in range(5):
            query = q[0, head, row]
            expected = torch.zeros(8, dtype=torch.float64)
            for keys, values in (
                (k[0, head, : row + 1], v[0, head, : row + 1]),
                (adapter_k[0, head], gated_v[0, head]),
            ):
                weights = [math.exp(float(query @ key) / math.sqrt(8)) for key in keys]
                for weight, value in zip(weights, values, strict=True):
                    expected += weight / sum(weights) * value
            assert difference(ours[0, head, row], expected) < 1e-12  # float64 has 16 digits


def test_rotary_turns_each_pair_by_position_times_frequency() -> None:
    cos, sin = rotary_table(8, num_positions=50, theta=10000.0)
    x = torch.randn(1, 50, 1, 8, generator=torch.Generator().manual_seed(0))
    turned, negated = rotate(x, -x, cos[None, :, None], sin[None, :, None])
    assert torch.equal(negated, -turned)
    for position in (0, 1, 17, 49):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            first, second = float(x[0, position, 0, pair]), float(x[0, position, 0, pair + 4])
            expected = complex(first, second) * complex(math.cos(angle), math.sin(angle))
            # The angle is the product of rounded numbers. Then come cosine or sine, two products and their sum.
            limit = (3 * angle + 4) * unit(torch.float32) * abs(expected)
            assert float(turned[0, position, 0, pair]) == pytest.approx(expected.real, abs=limit)
            assert float(turned[0, position, 0, pair + 4]) == pytest.approx(expected.imag, abs=limit)


def test_one_token_steps_equal_the_full_forward() -> None:
    decoder = toy_decoder()
    prefix = decoder.project_prefix(toy_visual_queries(2))
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = decoder.logits(forward(decoder, ids, prefix))
    cache = KVCache(CONFIG, num_slots=3, dtype=torch.float32, device="cpu")
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    hidden = decoder(ids[:, :12], torch.arange(12)[None], mask, prefix, cache.prefill_view(slice(0, 2)))
    assert difference(decoder.logits(hidden), expected[:, :12]) <= rounding()
    for position in range(12, 20):
        positions = torch.full((2,), position)
        mask = torch.ones(1, 1, 1, position + 1, dtype=torch.bool)
        view = DecodeView(cache.layers(2), positions_B=positions, length=position + 1)
        hidden = decoder(ids[:, position, None], positions[:, None], mask, prefix, view)
        assert difference(decoder.logits(hidden)[:, 0], expected[:, position]) <= rounding()


def test_closed_gates_make_the_picture_invisible() -> None:
    decoder = toy_decoder()
    decoder.adapter.gates.zero_()
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    seen = [forward(decoder, ids, decoder.project_prefix(query[None])) for query in toy_visual_queries(2)]
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("num_adapter_layers", [0, 1, 2, 3])
def test_equal_prompts_share_computation_before_the_adapter(num_adapter_layers: int) -> None:
    config = replace(CONFIG, num_adapter_layers=num_adapter_layers)
    decoder = toy_decoder(config)
    prefix = decoder.project_prefix(toy_visual_queries(3, config=config))
    ids = torch.randint(3, 300, (1, 7), generator=torch.Generator().manual_seed(0))
    positions, mask = torch.arange(7)[None], torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    rows_of_layers: list[int] = []
    for layer in decoder.layers:
        layer.attention.qkv.register_forward_hook(lambda _, inputs, __: rows_of_layers.append(len(inputs[0])))
    caches = [KVCache(config, num_slots=3, dtype=torch.float32, device="cpu") for _ in range(2)]
    hidden = [
        decoder(rows, positions, mask, prefix, cache.prefill_view(slice(0, 3)))
        for rows, cache in zip((ids.expand(3, -1), ids), caches, strict=True)
    ]

    assert difference(hidden[1], hidden[0]) <= rounding(config)  # smaller numbers than the logits
    for name in ("k", "v"):
        assert difference(getattr(caches[1], name), getattr(caches[0], name)) <= rounding(config)
    # The first adapter layer's projections do not depend on the picture yet.
    num_shared = min(config.first_adapter_layer + 1, config.num_layers)
    assert rows_of_layers == [3, 3, 3] + [1] * num_shared + [3] * (config.num_layers - num_shared)
