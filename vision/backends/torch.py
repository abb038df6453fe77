"""The encoder run by torch, on whatever device its weights are."""

import numpy as np
import torch
from torch import Tensor

from vision.encoder import PictureEncoder


class TorchVisionBackend:
    """Runs a `PictureEncoder` as it is.

    With `batch_sizes`, ascending, a batch is filled up to the next of them: for devices on which every new shape costs.
    """

    def __init__(
        self, encoder: PictureEncoder, *, device: torch.device, batch_sizes: tuple[int, ...] | None = None
    ) -> None:
        self._encoder = encoder.to(device)
        self._device, self._batch_sizes = device, batch_sizes or ()

    @property
    def name(self) -> str:
        return "torch"

    @property
    def image_size(self) -> int:
        return self._encoder.config.clip.image_size

    @torch.inference_mode()
    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels uint8 (B, S, S, 3) RGB -> visual query (B, Q, D)."""
        num_pictures = len(pixels_BHWC)
        size = next((size for size in self._batch_sizes if size >= num_pictures), num_pictures)
        if size > num_pictures:
            pixels_BHWC = np.concatenate([pixels_BHWC, np.repeat(pixels_BHWC[-1:], size - num_pictures, axis=0)])
        visual_query_BQD: Tensor = self._encoder(torch.from_numpy(pixels_BHWC).to(self._device))
        return visual_query_BQD[:num_pictures]

    def close(self) -> None:
        return
