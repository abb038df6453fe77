"""The protocol that every vision backend follows, and those of models whose picture half is not here."""

from typing import TYPE_CHECKING, Any, Protocol, Union

import numpy as np

from llama_adapter.vision.config import VIT_L_14, VisionConfig
from llama_adapter.vision.errors import PictureError

if TYPE_CHECKING:  # exported encoders run without torch
    from torch import Tensor

VisualQuery = Union["Tensor", np.ndarray]  # (B, Q, D)


def as_array(visual_query_BQD: VisualQuery) -> np.ndarray:
    """A visual query in float32 on the host."""
    given: Any = visual_query_BQD
    array: np.ndarray = given.astype(np.float32) if isinstance(given, np.ndarray) else given.float().cpu().numpy()
    return array


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

    def encode(self, pixels_BHWC: np.ndarray) -> VisualQuery:
        """Pixels (B, S, S, 3) RGB -> visual query (B, Q, D), in the encoder's type: a tensor on the backend's device,
        or an array where torch is not used.

        Pixels are uint8, or float32 on the scale of 0..255, between whole numbers and beyond the scale too.

        Raises GraphError when an exported encoder, or what runs it, fails.
        """
        ...

    def close(self) -> None:
        """Release device, thread and process; a closed backend cannot encode any more. May be repeated."""
        ...


class NoEncoder:
    """Of LLaMA alone: encodes nothing."""

    name = "none"
    image_size = VIT_L_14.image_size

    def encode(self, pixels_BHWC: np.ndarray) -> VisualQuery:
        """Raises PictureError."""
        raise PictureError("unsupported", "This LLaMA has no adapter, and sees no pictures.")

    def close(self) -> None:
        return


class EncodedBefore:
    """Of a decoder whose pictures come as visual queries: passes them on."""

    name = "prefixes"

    def __init__(self, config: VisionConfig) -> None:
        """`config` is that of the encoder that made the visual queries."""
        self.image_size = config.clip.image_size

    def encode(self, pixels_BHWC: np.ndarray) -> VisualQuery:
        """In place of pixels, visual queries (B, Q, D) in float32."""
        return pixels_BHWC

    def close(self) -> None:
        return
