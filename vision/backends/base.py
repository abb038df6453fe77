"""The protocol that every vision backend follows."""

from typing import Protocol

import numpy as np
from torch import Tensor


class VisionBackend(Protocol):
    """Turns preprocessed pictures into visual queries. Any number of pictures; one call at a time."""

    @property
    def name(self) -> str:
        """For reports, for example `torch` or `onnxruntime (CPUExecutionProvider)`."""
        ...

    @property
    def image_size(self) -> int:
        """Side of the square pictures it takes, in pixels."""
        ...

    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels (B, S, S, 3) RGB -> visual query (B, Q, D), on the backend's device, in the encoder's type.

        Pixels are uint8, or float32 on the scale of 0..255, between whole numbers and beyond the scale too.

        Raises GraphError when an exported encoder, or what runs it, fails.
        """
        ...

    def close(self) -> None:
        """Release device, thread and process; a closed backend cannot encode any more. May be repeated."""
        ...
