"""How many pictures the host encodes in one call."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.vision.backends.batches import USUAL_CACHE_BYTES, best_batch_size, even_batches, last_cache_bytes
from tests.fakes.exported import embedded_encoder


@given(st.integers(1, 300), st.integers(1, 40))
def test_the_fewest_calls_hold_all_pictures_as_evenly_as_can_be(num_pictures: int, largest: int) -> None:
    sizes = even_batches(num_pictures, largest=largest)

    assert sum(sizes) == num_pictures
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num_pictures // largest)


def test_the_widest_activations_of_a_batch_take_a_quarter_of_the_cache() -> None:
    config = embedded_encoder().config
    cache_bytes = 10 << 20
    tokens = 1 + config.clip.num_patches + config.query.num_queries
    picture_bytes = 4 * tokens * config.query.mlp_dim

    best = best_batch_size(config, itemsize=4, cache_bytes=cache_bytes)

    assert best * picture_bytes <= cache_bytes / 4 < (best + 1) * picture_bytes
    assert best_batch_size(config, itemsize=2, cache_bytes=cache_bytes) // 2 == best
    assert best_batch_size(config, itemsize=4, cache_bytes=1) == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["48K", "1024K", "32768K"], 32 << 20),
        (["32K", "4M"], 4 << 20),
        (["", "odd", "4X"], USUAL_CACHE_BYTES),
        ([], USUAL_CACHE_BYTES),
    ],
)
def test_the_largest_cache_counts_where_the_system_tells(texts: list[str], expected: int, tmp_path: Path) -> None:
    for index, text in enumerate(texts):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text + "\n")

    assert last_cache_bytes(tmp_path) == expected
