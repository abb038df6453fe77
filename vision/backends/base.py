"""The protocol that every vision backend follows."""

from typing import Protocol

import numpy as np
from torch import Tensor


class VisionBackend(Protocol):
    """Turns preprocessed pictures into visual queries."""

    @property
    def image_size(self) -> int:
        """Side of the square pictures it takes, in pixels."""
        ...

    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels uint8 (B, S, S, 3) RGB -> visual query (B, Q, D) on the decoder's device."""
        ...
