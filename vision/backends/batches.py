"""How many pictures the host encodes in one call: as many as leave a layer's activations in the processor's caches."""

import math
from pathlib import Path
from typing import Final

from llama_adapter.vision.config import VisionConfig

CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE_BYTES: Final = 16 << 20  # of processors whose system does not tell
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def best_batch_size(config: VisionConfig, *, itemsize: int, cache_bytes: int) -> int:
    """Pictures in a call of the encoder, at least 1; `itemsize` is that of its numbers, in bytes.

    The widest activations are those inside a block's two linear layers. They get a quarter of the cache: weights stream
    by, and operators read as much as they write. Of a ViT-L/14 in bfloat16, five at a time were an eighth slower than
    three.
    """
    clip, query = config.clip, config.query
    num_tokens = 1 + clip.num_patches
    widest = max(num_tokens * 4 * clip.width, (num_tokens + query.num_queries) * query.mlp_dim)
    return max(1, cache_bytes // 4 // (widest * itemsize))


def even_batches(num_pictures: int, *, largest: int) -> list[int]:
    """Sizes of the fewest calls of at most `largest` pictures, as equal as they can be."""
    num_calls = max(1, math.ceil(num_pictures / largest))
    fewer, num_larger = divmod(num_pictures, num_calls)
    return [fewer + 1] * num_larger + [fewer] * (num_calls - num_larger)


def last_cache_bytes(caches: Path = CACHES) -> int:
    """Size of the largest cache that the first core has, as the system tells it."""
    sizes = [_parse(place) for place in caches.glob("index*/size")]
    return max(filter(None, sizes), default=USUAL_CACHE_BYTES)


def _parse(place: Path) -> int:
    """`32768K` -> bytes; 0 for what is no size."""
    try:
        text = place.read_text(encoding="ascii").strip()
        return int(text[:-1]) * _UNITS[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return 0
