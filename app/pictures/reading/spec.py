"""How pictures are read: plain values, which a reading process receives."""

from dataclasses import dataclass
from typing import Final, Literal

from llama_adapter.vision.files import DEFAULT_MAX_BYTES, DEFAULT_MAX_PIXELS
from llama_adapter.vision.formats import Damaged, Orientation, Reading, Transparency, WantedOrder

ReaderKind = Literal["process", "thread"]  # what reads a command's pictures

DEFAULT_READER: Final[ReaderKind] = "process"
DEFAULT_PICTURE_TIMEOUT_S = 60.0  # per picture; long enough for slow disks and networks


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingSpec:
    """How a file becomes the encoder's pixels. With `prefixes`, pictures are encoded already and have no pixels.

    `max_pixels` and `max_bytes` are limits of one picture file.
    """

    exif: Orientation = "upright"
    transparency: Transparency = "white"
    damaged: Damaged = "refuse"
    reading: Reading = "exact"
    channel_order: WantedOrder = "auto"
    prefixes: str | None = None  # a prefix file, or a folder of them
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_bytes: int = DEFAULT_MAX_BYTES
