"""Counted work equals numbers worked out by hand for small sizes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import bfloat16, device, nn

from llama_adapter.app.models.roofline import (
    Ceiling,
    NumberSizes,
    Work,
    decoder_weights,
    encoder_weights,
    encoder_work,
    explain,
    number_sizes,
    prefill_work,
    prefix_work,
    step_work,
)
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.runtime.schemes import Precision
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder
from tests.llm.toys import CONFIG

DECODER = replace(CONFIG, head_dim=0, num_kv_heads=0, vocab_size=10, dim=4, num_heads=2, ffn_dim=8, context=16)
# 4 patches of 2 x 2 pixels with 3 colours.
VISION = VisionConfig(
    clip=ClipConfig(image_size=4, patch_size=2, width=2, num_layers=1, num_heads=1, output_dim=3),
    query=QueryConfig(num_queries=2, width=4, depth=1, num_heads=1, mlp_dim=6, output_dim=4),
)


def test_a_decode_step_reads_all_weights_and_the_cache_of_its_rows() -> None:
    # Positions 2 and 5 attend to 3 and 6 tokens.
    work = step_work(DECODER, positions=[2, 5], sizes=NumberSizes(2, 2))

    products = 2 * 2 * (480 + 40)
    attention = 3 * 4 * 9 * 4
    adapter = 2 * 4 * (2 * 5) * 4
    assert work.flops == products + attention + adapter == 2832
    cached, prefix = 2 * 3 * 4 * 9, 2 * (2 * 2 * 5 * 4)
    assert work.bytes == 2 * (480 + 40 + cached + prefix) == 1792


def test_a_prefill_counts_causal_attention_and_the_requested_logits() -> None:
    work = prefill_work(DECODER, lengths=[3, 2], num_logits=2, sizes=NumberSizes(4, 4))

    ends = 2 * (5 - 2) * (16 + 3 * 4 * 8)  # work of the last layer that is saved for tokens without logits
    products = 2 * 5 * 480 - ends + 2 * 2 * 40
    attention = 3 * 4 * (6 + 3) * 4
    adapter = 2 * 4 * (5 * 5) * 4
    assert work.flops == products + attention + adapter == 5520
    assert work.bytes == 4 * (480 + 40 + 2 * 3 * 4 * 5 + 2 * 80) == 3200


def test_what_equal_prompts_share_is_counted_once() -> None:
    def flops(*, equal_rows: bool) -> int:
        sizes = NumberSizes(4, 4)
        return prefill_work(DECODER, lengths=[3] * 4, num_logits=4, sizes=sizes, equal_rows=equal_rows).flops

    # Shared work: the 160 weights and the attention of layer 0, which has no adapter, and queries, keys and values of
    # layer 1.
    products, attention = 2 * 3 * (160 + 3 * 16), 4 * 6 * 4
    assert flops(equal_rows=False) - flops(equal_rows=True) == 3 * (products + attention)


def test_equal_prompts_without_an_adapter_cost_as_much_as_one() -> None:
    sizes, plain = NumberSizes(4, 4), replace(DECODER, num_adapter_layers=0)
    alone = prefill_work(plain, lengths=[3], num_logits=1, sizes=sizes).flops
    together = prefill_work(plain, lengths=[3] * 4, num_logits=4, sizes=sizes, equal_rows=True).flops

    assert together == alone + 3 * 2 * 40  # only the head is computed for each row


def test_int8_weights_are_one_byte_each_and_the_cache_is_unchanged() -> None:
    sizes = NumberSizes(weight=1, other=4)

    assert step_work(DECODER, positions=[2, 5], sizes=sizes).bytes == 480 + 40 + 4 * (2 * 3 * 4 * 9 + 2 * 80)
    assert prefix_work(DECODER, num_pictures=3, sizes=sizes).bytes == 2 * 2 * 16 + 4 * 3 * 80
    assert encoder_work(VISION, num_pictures=2, sizes=sizes).bytes == 24 + 48 + 6 + 12 + 112 + 16
    sizes = NumberSizes(weight=0.5, other=4, head=1)
    assert step_work(DECODER, positions=[2, 5], sizes=sizes).bytes == 240 + 40 + 4 * (2 * 3 * 4 * 9 + 2 * 80)


@pytest.mark.parametrize(("precision", "weight", "head"), [("float", 2.0, 2.0), ("int8", 1.0, 1.0), ("int4", 0.5, 1.0)])
def test_a_device_reads_the_head_of_4_bits_in_8(precision: Precision, weight: float, head: float) -> None:
    device: Any = SimpleNamespace(computes_in=lambda precision, dtype, wanted: wanted == "auto")
    sizes, widened = (
        number_sizes(device, dtype=bfloat16, precision=precision, wanted=wanted) for wanted in ("auto", "aten")
    )
    assert sizes == NumberSizes(weight, 2, head)
    assert widened == NumberSizes(2.0, 2, 2.0)


def test_an_encoder_is_counted_layer_by_layer_and_a_prefix_with_its_products() -> None:
    work = encoder_work(VISION, num_pictures=2, sizes=NumberSizes(4, 4))
    prefix = prefix_work(DECODER, num_pictures=3, sizes=NumberSizes(4, 4))  # two products for each adapter layer

    assert prefix == Work(2 * 3 * 5 * (2 * 2 * 16), 4 * (2 * 2 * 16 + 3 * 80))
    # CLIP: patches, blocks, attention, projection. Visual block: input, queries, keys and values for all tokens, the
    # rest for the 2 queries, attention, output.
    clip = 2 * 4 * (12 * 2) + 2 * 5 * (12 * 4) + 4 * 25 * 2 + 2 * 5 * (2 * 3)
    blocks = 2 * 5 * (3 * 4) + 2 * 7 * (3 * 16) + 2 * 2 * (16 + 2 * 24) + 4 * (2 * 7) * 4 + 2 * 2 * 16
    assert work == Work(2 * (clip + blocks), 4 * (24 + 48 + 6 + 12 + 112 + 16))


def test_counted_weights_are_those_of_the_modules() -> None:
    def matrices(module: nn.Module) -> int:
        kinds = (nn.Linear, nn.Conv2d, nn.Embedding)
        return sum(part.weight.numel() for part in module.modules() if isinstance(part, kinds))

    with device("meta"):
        for config in (DECODER, DECODER.share(1, 2)):
            assert matrices(LlamaAdapterDecoder(config)) == decoder_weights(config)
        assert matrices(PictureEncoder(VISION)) == encoder_weights(VISION)


def test_the_least_time_is_set_by_the_lower_ceiling_and_unexplained_time_is_overhead() -> None:
    ceiling = Ceiling(bytes_per_s=10.0, flops_per_s=100.0)

    assert ceiling.seconds(Work(flops=100, bytes=50)) == (5.0, "memory")
    assert ceiling.seconds(Work(flops=1000, bytes=50)) == (10.0, "arithmetic")
    shares = explain([(4.0, 3.0, "memory"), (2.0, 2.5, "arithmetic")], read_s=1.0, wall_s=10.0)
    assert shares == pytest.approx({"memory": 0.3, "arithmetic": 0.2, "reading": 0.1, "overhead": 0.4})
    assert set(explain([], read_s=0.0, wall_s=0.0).values()) == {0.0}
