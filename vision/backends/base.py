"""The protocol of vision backends, and backends for models that are loaded without an encoder."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Union

import numpy as np

from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.pixels import CLIP_PIXELS, PixelRule

if TYPE_CHECKING:  # exported encoders run without torch
    from torch import Tensor

VisualQuery = Union["Tensor", np.ndarray]  # (B, Q, D)


def as_array(visual_query_BQD: VisualQuery) -> np.ndarray:
    """A visual query in float32 on the host."""
    given: Any = visual_query_BQD
    array: np.ndarray = given.astype(np.float32) if isinstance(given, np.ndarray) else given.float().cpu().numpy()
    return array


def fetch_array(visual_query_BQD: VisualQuery) -> Callable[[], np.ndarray]:
    """As `as_array`, when the function that is returned is called. A copy from a device begins at once."""
    if isinstance(visual_query_BQD, np.ndarray):
        array = as_array(visual_query_BQD)
        return lambda: array
    from llama_adapter.runtime.devices.transfer import fetch  # imports torch

    found = fetch(visual_query_BQD)
    return lambda: as_array(found())


class VisionBackend(Protocol):
    """Turns preprocessed pictures into visual queries. A call may have any number of pictures. Not thread-safe."""

    @property
    def name(self) -> str:
        """The name for reports, for example `torch` or `onnxruntime (CPUExecutionProvider)`."""

    @property
    def pixels(self) -> PixelRule:
        """How pictures become the pixels that `encode` takes."""

    def encode(self, pixels_BHWC: np.ndarray) -> VisualQuery:
        """Pixels (B, S, S, 3) RGB -> visual query (B, Q, D) in the encoder's dtype.

        The result is a tensor on the backend's device, or a numpy array if torch does not compute it. Pixels are uint8,
        or float32 on the scale 0..255; float32 pixels may have fractions and may exceed this range.

        Raises GraphError if an exported encoder or its runtime fails.
        """

    def close(self) -> None:
        """Release device, thread and process. A closed backend can no longer encode. May be repeated."""


class NoEncoder:
    """The backend of a LLaMA without adapter, which cannot encode pictures."""

    name = "none"
    pixels = CLIP_PIXELS

    def encode(self, pixels_BHWC: np.ndarray) -> VisualQuery:
        """Raises PictureError."""
        raise PictureError("unsupported", "This LLaMA has no adapter, and sees no pictures.")

    def close(self) -> None:
        return


class EncodedBefore:
    """The backend of a decoder whose pictures are already visual queries: it returns them unchanged."""

    name = "prefixes"

    def __init__(self, config: VisionConfig) -> None:
        """`config` is that of the encoder that made the visual queries."""
        self.pixels = config.clip.pixels

    def encode(self, pixels_BHWC: np.ndarray) -> VisualQuery:
        """Takes visual queries (B, Q, D) in float32 instead of pixels."""
        return pixels_BHWC

    def close(self) -> None:
        return
