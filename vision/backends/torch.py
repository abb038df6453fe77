"""The encoder run by torch, on any device. On the host, the number of pictures per call suits the caches."""

import math
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.programs import GraphMode, RepeatedPrograms
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.inference import HostEncoder

CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE_BYTES: Final = 16 << 20  # used if the system does not state it
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class TorchVisionBackend:
    """Runs a `PictureEncoder`, on the host as a `HostEncoder`.

    With `batch_sizes`, in ascending order, a batch is padded to the next of these sizes, for devices on which each new
    shape costs time. Calls have at most `largest_batch` pictures. None means all at once; on the host, it means a
    number that suits the caches. With `mode`, a number of pictures that occurs again is recorded as a graph.
    """

    def __init__(
        self,
        encoder: PictureEncoder,
        *,
        device: torch.device,
        batch_sizes: tuple[int, ...] | None = None,
        largest_batch: int | None = None,
        mode: GraphMode | None = None,
    ) -> None:
        self.name, self.pixels = "torch", encoder.config.clip.pixels
        self.batch_sizes = batch_sizes or ()
        self._device, self._largest_batch = device, largest_batch
        self._programs = None if mode is None else RepeatedPrograms(mode, of="the encoder")
        self.module: nn.Module = encoder.to(device)  # the caller may convert its weights to a device's layout
        if device.type == "cpu":
            self.module = HostEncoder(encoder)
            if largest_batch is None:
                self._largest_batch = best_batch_size(
                    encoder.config, itemsize=encoder.dtype.itemsize, cache_bytes=last_cache_bytes()
                )

    @torch.inference_mode()
    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """As `VisionBackend.encode`."""
        num_pictures = len(pixels_BHWC)
        size = next((size for size in self.batch_sizes if size >= num_pictures), num_pictures)
        if size > num_pictures:
            pixels_BHWC = np.concatenate([pixels_BHWC, np.repeat(pixels_BHWC[-1:], size - num_pictures, axis=0)])
        sizes = even_batches(size, largest=self._largest_batch or max(size, 1))
        batches = np.split(pixels_BHWC, np.cumsum(sizes)[:-1])
        queries = [self._run(torch.from_numpy(batch_BHWC).to(self._device)) for batch_BHWC in batches]
        return (queries[0] if len(queries) == 1 else torch.cat(queries))[:num_pictures]

    def _run(self, pixels_BHWC: Tensor) -> Tensor:
        module = self.module
        if self._programs is None:
            visual_query_BQD: Tensor = module(pixels_BHWC)
            return visual_query_BQD
        key = len(pixels_BHWC), pixels_BHWC.dtype
        (shared_BQD,) = self._programs.run(key, lambda pixels_BHWC: (module(pixels_BHWC),), pixels_BHWC)
        copied_BQD: Tensor = shared_BQD.clone()  # the next graph may overwrite it
        return copied_BQD

    def close(self) -> None:
        return


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
