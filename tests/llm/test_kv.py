"""Memory of the slots."""

import os

import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.kv import KVCache
from scripts.common import process_mib
from tests.llm.toys import CONFIG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_take_memory_when_rows_are_written(dtype: torch.dtype) -> None:
    values = CONFIG.to_dict() | {"context": 65536}
    before = process_mib(os.getpid())
    cache = KVCache(DecoderConfig.from_dict(values), num_slots=16, dtype=dtype, device="cpu")
    assert (cache.k.dtype, cache.v.shape) == (dtype, cache.k.shape)
    assert cache.k.nbytes > 2**27
    assert process_mib(os.getpid()) - before < 16
    cache.k[:, 3, :, :100] = 1
    assert cache.k.sum() == cache.k[:, 3, :, :100].numel()
    assert not cache.v[:, 3].any()


@pytest.mark.parametrize("num_given", [1, 2])
def test_slots_are_a_slice_or_ids(num_given: int) -> None:
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(num_given, CONFIG.num_heads, 5, CONFIG.head_dim, generator=draw) for _ in range(2))
    sliced, indexed = (KVCache(CONFIG, num_slots=4, dtype=torch.float32, device="cpu") for _ in range(2))
    for cache, slots in ((sliced, slice(1, 3)), (indexed, torch.tensor([1, 2]))):
        cache.prefill_view(slots).update(0, k, v)

    assert torch.equal(indexed.k, sliced.k)
    assert torch.equal(indexed.v, sliced.v)
    assert torch.equal(indexed.k[0, 1:3, :, :5], k.expand(2, -1, -1, -1))
    assert not indexed.k[0, [0, 3]].any()
