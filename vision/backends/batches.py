"""How many pictures an encoder on the host takes in one call, to suit the caches. Imports no torch."""

import math
from pathlib import Path
from typing import Final

from llama_adapter.vision.config import VisionConfig

CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE_BYTES: Final = 16 << 20  # used if the system does not state it
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def best_batch_size(config: VisionConfig, *, itemsize: int, cache_bytes: int) -> int:
    """Pictures in one call of the encoder, at least 1. `itemsize` is the number of bytes of its dtype.

    The widest activations, between the two linear layers of a block's MLP, may take a quarter of the cache, because
    weights also pass through it and operators read as much as they write. With ViT-L/14 in bfloat16, five pictures per
    call were an eighth slower than three.
    """
    clip, query = config.clip, config.query
    tower = clip.num_tokens * clip.hidden_dim
    widest = max(tower, (clip.num_features + query.num_queries) * query.mlp_dim)
    return max(1, cache_bytes // 4 // (widest * itemsize))


def even_batches(num_pictures: int, *, largest: int) -> list[int]:
    """Sizes of the fewest calls of at most `largest` pictures each, as equal as possible."""
    num_calls = max(1, math.ceil(num_pictures / largest))
    fewer, num_larger = divmod(num_pictures, num_calls)
    return [fewer + 1] * num_larger + [fewer] * (num_calls - num_larger)


def last_cache_bytes(caches: Path = CACHES) -> int:
    """Size in bytes of the largest cache of the first core, from files in /sys."""
    sizes = [_parse(place) for place in caches.glob("index*/size")]
    return max(filter(None, sizes), default=USUAL_CACHE_BYTES)


def _parse(place: Path) -> int:
    """`32768K` -> bytes; 0 for anything else."""
    try:
        text = place.read_text(encoding="ascii").strip()
        return int(text[:-1]) * _UNITS[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return 0
