"""The encoder run by torch, on any device. The number of pictures per call suits the caches, or the recordings."""

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.programs import GraphMode, RepeatedPrograms
from llama_adapter.runtime.devices.transfer import upload
from llama_adapter.runtime.operators import undisturbed
from llama_adapter.vision.backends.batches import best_batch_size, even_batches, last_cache_bytes
from llama_adapter.vision.encoder import PictureEncoder

MOST_RECORDED = 64  # pictures of a recorded call: more at once are hardly faster, and would be recorded too


class TorchVisionBackend:
    """Runs a `PictureEncoder`.

    With `batch_sizes`, in ascending order, a batch is padded to the next of these sizes, for devices on which each new
    shape costs time. Calls have at most `largest_batch` pictures. None means all at once; on the host, it means a
    number that suits the caches. With `mode`, calls have at most `MOST_RECORDED` pictures, and a number of pictures
    that occurs again is recorded as a graph. The host does not wait for a device with a queue.
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
        self.name, self.pixels, self.dtype = "torch", encoder.config.clip.pixels, encoder.dtype
        self.batch_sizes = batch_sizes or ()
        self._device, self._largest_batch = device, largest_batch
        self._programs = None if mode is None else RepeatedPrograms(mode, of="the encoder")
        self.module: nn.Module = encoder.to(device)  # the caller may convert its weights to a device's layout
        if device.type == "cpu" and largest_batch is None:
            self._largest_batch = best_batch_size(
                encoder.config, itemsize=encoder.dtype.itemsize, cache_bytes=last_cache_bytes()
            )

    @undisturbed
    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """As `VisionBackend.encode`."""
        num_pictures = len(pixels_BHWC)
        size = next((size for size in self.batch_sizes if size >= num_pictures), num_pictures)
        if size > num_pictures:
            pixels_BHWC = np.concatenate([pixels_BHWC, np.repeat(pixels_BHWC[-1:], size - num_pictures, axis=0)])
        largest = self._largest_batch or max(size, 1)
        if self._programs is None:
            sizes = even_batches(size, largest=largest)
        else:  # calls of few sizes, so that most are recorded
            largest = min(largest, MOST_RECORDED)
            sizes = [largest] * (size // largest) + [size % largest] * (size % largest > 0 or not size)
        batches = np.split(pixels_BHWC, np.cumsum(sizes)[:-1])
        queries = [self._run(upload(batch_BHWC, self._device)) for batch_BHWC in batches]
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
