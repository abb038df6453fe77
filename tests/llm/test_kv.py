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
