"""A picture's bytes -> a small JPEG as a data address, for pages that show many. Refuses what the reader refuses."""

import base64
from io import BytesIO
from typing import Final

from PIL import Image

from app.spec import Orientation
from vision.errors import PictureError
from vision.image import load_picture

THUMBNAIL_SIDE: Final = 160
_BACKGROUND: Final = (128, 128, 128)


def thumbnail(data: bytes, *, max_pixels: int, max_bytes: int, orientation: Orientation = "upright") -> str | None:
    """`data:image/jpeg;base64,...` with both sides at most `THUMBNAIL_SIDE`; None for what cannot be read."""
    try:
        loaded = load_picture(
            data, orientation=orientation, max_pixels=max_pixels, max_bytes=max_bytes, least_side=THUMBNAIL_SIDE
        )
    except PictureError:
        return None
    try:
        small = _as_rgb(loaded.image)
        small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
        packed = BytesIO()
        small.save(packed, "JPEG", quality=80)
    except (OSError, ValueError, MemoryError):  # a mode that Pillow cannot convert, or sides that vanish
        return None
    return "data:image/jpeg;base64," + base64.b64encode(packed.getvalue()).decode()


def _as_rgb(image: Image.Image) -> Image.Image:
    """What is transparent stands on grey."""
    if image.mode.startswith("I") or image.mode == "F":
        image = image.point(lambda value: value / 256) if image.mode.startswith("I;16") else image
        return image.convert("L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    ground = Image.new("RGB", seen.size, _BACKGROUND)
    ground.paste(seen, mask=seen.getchannel("A"))
    return ground
