"""The encoder run by torch, on whatever device its weights are."""

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.vision.backends.batches import best_batch_size, even_batches, last_cache_bytes
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.inference import HostEncoder


class TorchVisionBackend:
    """Runs a `PictureEncoder`, on the host in the form of `HostEncoder`.

    With `batch_sizes`, ascending, a batch is filled up to the next of them: for devices on which every new shape costs.
    Calls have at most `largest_batch` pictures: None means all at once, and on the host what suits its caches.
    """

    def __init__(
        self,
        encoder: PictureEncoder,
        *,
        device: torch.device,
        batch_sizes: tuple[int, ...] | None = None,
        largest_batch: int | None = None,
    ) -> None:
        self._config = encoder.config
        self._device, self._batch_sizes, self._largest_batch = device, batch_sizes or (), largest_batch
        self.module: nn.Module = encoder.to(device)  # for a device's own layout of weights
        if device.type == "cpu":
            self.module = HostEncoder(encoder)
            if largest_batch is None:
                self._largest_batch = best_batch_size(
                    encoder.config, itemsize=encoder.dtype.itemsize, cache_bytes=last_cache_bytes()
                )

    @property
    def name(self) -> str:
        return "torch"

    @property
    def image_size(self) -> int:
        return self._config.clip.image_size

    @torch.inference_mode()
    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels uint8 (B, S, S, 3) RGB -> visual query (B, Q, D)."""
        num_pictures = len(pixels_BHWC)
        size = next((size for size in self._batch_sizes if size >= num_pictures), num_pictures)
        if size > num_pictures:
            pixels_BHWC = np.concatenate([pixels_BHWC, np.repeat(pixels_BHWC[-1:], size - num_pictures, axis=0)])
        sizes = even_batches(size, largest=self._largest_batch or max(size, 1))
        batches = np.split(pixels_BHWC, np.cumsum(sizes)[:-1])
        queries = [self.module(torch.from_numpy(batch_BHWC).to(self._device)) for batch_BHWC in batches]
        return (queries[0] if len(queries) == 1 else torch.cat(queries))[:num_pictures]

    def close(self) -> None:
        return
