"""The encoder run by torch, on whatever device its weights are."""

import numpy as np
import torch
from torch import Tensor

from vision.encoder import PictureEncoder


class TorchVisionBackend:
    """Runs a `PictureEncoder` as it is."""

    def __init__(self, encoder: PictureEncoder, *, device: torch.device) -> None:
        self._encoder = encoder.to(device)
        self._device = device

    @property
    def name(self) -> str:
        return "torch"

    @property
    def image_size(self) -> int:
        return self._encoder.config.clip.image_size

    @torch.inference_mode()
    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels uint8 (B, S, S, 3) RGB -> visual query (B, Q, D)."""
        visual_query_BQD: Tensor = self._encoder(torch.from_numpy(pixels_BHWC).to(self._device))
        return visual_query_BQD

    def close(self) -> None:
        return
