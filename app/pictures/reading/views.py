"""Pictures for display: reduced views, and data URIs for pages. Knows no model and no file limits."""

import base64
from io import BytesIO

import numpy as np
from PIL import Image


def data_address(image: Image.Image) -> str:
    """An RGB image as a data URI, `data:image/jpeg;base64,...`."""
    file = BytesIO()
    image.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def view_pixels(image: Image.Image, *, side: int) -> np.ndarray:
    """Pixels uint8 (H, W, 3), RGB, of the picture reduced to at most `side` pixels in width and height.

    Grey pictures of more than 8 bits are scaled to the range of values that occur. Raises the exceptions of Pillow for
    a mode that it cannot convert.
    """
    if image.mode.startswith(("I", "F")):
        return _deep_grey(image, side=side)
    small = image.convert("RGB")
    small.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(small)


def _deep_grey(image: Image.Image, *, side: int) -> np.ndarray:
    small = image if image.mode == "F" else image.convert("I")
    small.thumbnail((side, side), Image.Resampling.BILINEAR)
    values = np.nan_to_num(np.asarray(small, dtype=np.float64))
    values = (values - values.min()) / max(float(np.ptp(values)), 1e-9) * 255.0
    return np.repeat(values.astype(np.uint8)[..., None], 3, axis=2)
