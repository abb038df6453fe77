"""The decoder's ways of running compared with each other; tests/parity compares its mathematics with the reference."""

from dataclasses import replace

import psutil
import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.kv import DecodeView, KVCache
from tests.bounds import difference
from tests.llm.toys import CONFIG, FAMILIES, forward, rounding, toy_decoder, toy_visual_queries


@pytest.mark.parametrize("config", [CONFIG, *FAMILIES.values()], ids=["llama", *FAMILIES])
def test_one_token_steps_equal_the_full_forward(config: DecoderConfig) -> None:
    decoder = toy_decoder(config)
    prefix = decoder.project_prefix(toy_visual_queries(2, config=config))
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = decoder.logits(forward(decoder, ids, prefix))
    cache = KVCache(config, num_slots=3, dtype=torch.float32, device="cpu")
    assert cache.k.shape[2] == config.num_kv_heads
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    hidden = decoder(ids[:, :12], torch.arange(12)[None], mask, prefix, cache.prefill_view(slice(0, 2)))
    assert difference(decoder.logits(hidden), expected[:, :12]) <= rounding(config)
    for position in range(12, 20):
        positions = torch.full((2,), position)
        mask = torch.ones(1, 1, 1, position + 1, dtype=torch.bool)
        view = DecodeView(
            *cache.layers(slice(2), length=position + 1), positions_BS=positions[:, None], length=position + 1
        )
        hidden = decoder(ids[:, position, None], positions[:, None], mask, prefix, view)
        assert difference(decoder.logits(hidden)[:, 0], expected[:, position]) <= rounding(config)


@pytest.mark.parametrize("family", [CONFIG, FAMILIES["gemma"], FAMILIES["windows"]], ids=["llama", "gemma", "windows"])
@pytest.mark.parametrize("num_adapter_layers", [0, 1, 2, 3])
def test_equal_prompts_share_computation_before_the_adapter(num_adapter_layers: int, family: DecoderConfig) -> None:
    config = replace(family, num_adapter_layers=num_adapter_layers)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_take_memory_when_rows_are_written(dtype: torch.dtype) -> None:
    values = CONFIG.to_dict() | {"context": 65536}
    before = psutil.Process().memory_info().rss
    cache = KVCache(DecoderConfig.from_dict(values), num_slots=16, dtype=dtype, device="cpu")
    assert (cache.k.dtype, cache.v.shape) == (dtype, cache.k.shape)
    assert cache.k.nbytes > 2**27
    assert psutil.Process().memory_info().rss - before < 2**24
    cache.k[:, 3, :, :100] = 1
    assert cache.k.sum() == cache.k[:, 3, :, :100].numel()
    assert not cache.v[:, 3].any()
