"""Shares of a decoder: how it is divided, and reading them from every kind of checkpoint.

That they are the whole together is shown by the logits in test_native_ranks.py.
"""

import dataclasses

import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.split import dense, share_of, take
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.ranks import Alone
from tests.bounds import difference, largest, unit
from tests.llm.test_native_ranks import ODD
from tests.llm.toys import CONFIG, GOLDEN


class Place(Alone):
    """A rank, given only by its number and the number of ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def shares(config: DecoderConfig, size: int) -> list[DecoderConfig]:
    return [config.share(rank, size) for rank in range(size)]


@pytest.mark.parametrize("config", [CONFIG, ODD])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_divide_heads_units_and_tokens_without_rest(config: DecoderConfig, size: int) -> None:
    parts = shares(config, size)
    for ranges, count in (
        ([part.heads for part in parts], config.num_heads),
        ([config.ffn_range(rank, size) for rank in range(size)], config.ffn_dim),
        ([part.vocab_rows for part in parts], config.vocab_size),
    ):
        assert [place for part in ranges for place in part] == list(range(count))
        assert len(ranges[0]) == max(map(len, ranges))
        assert min(map(len, ranges)) > 0
    assert {part.head_dim for part in parts} == {config.head_dim}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_7b_is_divided_between_activations_that_share_a_scale(size: int) -> None:
    llama_7b = dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, dim=4096, num_heads=32, ffn_dim=11008)
    parts = shares(llama_7b, size)
    assert sum(part.ffn_dim for part in parts) == 11008
    assert all(part.ffn_dim % 128 == 0 and part.heads.start * part.head_dim % 128 == 0 for part in parts)


@pytest.mark.parametrize(
    ("ffn_dim", "size", "widths"),
    [
        (640, 2, [384, 256]),
        (640, 4, [256, 128, 128, 128]),
        (640, 6, [128, 128, 64, 128, 128, 64]),  # five blocks of 128 are too few
        (192, 2, [128, 64]),  # one and a half blocks
        (192, 4, [48, 48, 48, 48]),
        (100, 3, [34, 33, 33]),
    ],
)
def test_units_are_divided_in_the_largest_blocks_that_all_ranks_get(ffn_dim: int, size: int, widths: list[int]) -> None:
    config = dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, dim=64, num_heads=8, ffn_dim=ffn_dim)
    assert [part.ffn_dim for part in shares(config, size)] == widths


@pytest.mark.parametrize(("size", "words"), [(7, "6 heads, so 6 ranks"), (2, "rank 1 of 2 already")])
def test_what_cannot_be_divided_is_refused(size: int, words: str) -> None:
    config = ODD if size == 7 else ODD.share(1, 2)
    with pytest.raises(UsageError, match=words):
        share_of(config, Place(0, size))


def test_a_group_of_4_bit_weights_is_not_torn_apart() -> None:
    config = dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, dim=96, num_heads=4, ffn_dim=192)
    scales = torch.ones(96, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match="groups are larger"):
        take("layers.0.attention.out.weight_scale", scales, whole=config, share=config.share(0, 4))


@pytest.mark.parametrize("adapter_name", ["BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", None])
@pytest.mark.parametrize(
    ("folder", "size"), [("LLaMA/TINY", 4), ("LLaMA/TINY-2SHARD", 3), ("LLaMA/TINY-2SHARD", 4), ("LLaMA-HF/TINY", 2)]
)
def test_checkpoints_are_read_by_shares(folder: str, adapter_name: str | None, size: int) -> None:
    place = GOLDEN / folder
    source = open_huggingface(place) if "HF" in folder else open_meta(place)
    adapter = None if adapter_name is None else open_adapter(GOLDEN / "adapters" / f"{adapter_name}.pth")
    config = plan_decoder(source, adapter, vocab_size=512)
    whole = dict(decoder_tensors(config, source=source, adapter=adapter, dtype=torch.float32))
    for share in shares(config, size):
        read = dict(decoder_tensors(config, source=source, adapter=adapter, dtype=torch.float32, share=share))
        assert read.keys() == whole.keys()
        for name, tensor in dense(read.items()):
            wanted = take(name, whole[name], whole=config, share=share)
            # LoRA's products of 8 terms differ in size, and are added to the weights.
            assert difference(tensor, wanted) <= 2 * 9**0.5 * unit(torch.float32) * largest(wanted)


def test_parts_of_shards_are_views_of_the_files() -> None:
    source = open_meta(GOLDEN / "LLaMA" / "TINY-2SHARD")
    wanted = source.tensors["layers.0.attention.wq.weight"]
    half = wanted.shape[0] // 2
    read = wanted.read((0, range(half)))
    assert read.data_ptr() == wanted.parts[0].data_ptr()  # nothing is joined if one file has the whole range
    assert torch.equal(wanted.read((0, range(half - 3, half + 5))), wanted.read()[half - 3 : half + 5])
    assert torch.equal(wanted.read((1, range(7, 20))), wanted.read()[:, 7:20])


def test_a_past_has_the_heads_of_its_rank() -> None:
    values = torch.randn(2, 6, 4, 10).numpy()
    past = PastKeyValues(values, values + 1)
    part = past.of_heads(slice(2, 5))
    assert part.k_LNCH.shape == (2, 3, 4, 10)
    assert (part.v_LNCH == values[:, 2:5] + 1).all()
