"""An uploaded picture as its user sees it: what a browser's value stands for, size, preview, thumbnail. No Gradio."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from app.service.service import ServiceLimits
from app.web.chat_state import PickedPicture
from app.web.uploads import read_upload, uploaded
from vision.errors import PictureError
from vision.image import load_picture

File = tuple[str, str]  # path of an uploaded file, and its name on the user's disk

_SHOWN_BY_BROWSERS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")
_PREVIEW_SIDE = 1024  # pixels


def file_of(value: Any) -> File | None:
    """The path of an uploaded file and its name on the user's disk, from a component's value as the browser sent it.

    For events with `preprocess=False`: Gradio's own preprocessing opens pictures, converts them and saves other files.
    """
    path = uploaded(value.get("path")) if isinstance(value, dict) and isinstance(value.get("path"), str) else None
    if path is None:
        return None
    name = value.get("orig_name")
    return str(path), Path(name.replace("\\", "/")).name if isinstance(name, str) and name.strip() else path.name


def files_of(value: Any) -> list[File]:
    """As `file_of`, for a component of several files."""
    return [file for each in (value if isinstance(value, list) else []) if (file := file_of(each)) is not None]


def look(path: str, name: str, *, limits: ServiceLimits) -> PickedPicture:
    """What a picture is, or why it cannot be read; blocks while it is decoded."""
    try:
        data = read_upload(path, max_bytes=limits.max_picture_bytes)
        loaded = load_picture(
            data,
            name=name,
            max_pixels=limits.max_pixels,
            max_bytes=limits.max_picture_bytes,
            least_side=_PREVIEW_SIDE,
        )
    except PictureError as error:
        return PickedPicture(source=path, shown=path, name=name, problem=error.message)
    shown = path
    try:
        width, height = _size_upright(data)
        if Path(path).suffix.lower() not in _SHOWN_BY_BROWSERS:
            shown = _preview(loaded.image, beside=Path(path))
    except (OSError, ValueError, TypeError, SyntaxError, MemoryError):  # odd metadata, or colours that do not convert
        width, height = loaded.width, loaded.height
    return PickedPicture(source=path, shown=shown, name=name, width=width, height=height, num_bytes=len(data))


def thumbnail(image: Image.Image, *, side: int) -> str:
    """A small picture as a `data:` address, to stand inside HTML; `side` is its longer one, in pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _size_upright(data: bytes) -> tuple[int, int]:
    """Width and height as the user sees them, from the header alone; the picture has been read before."""
    with Image.open(io.BytesIO(data)) as image:
        turned = image.getexif().get(0x0112) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def _preview(image: Image.Image, *, beside: Path) -> str:
    """A WebP of moderate size in the same folder, for formats that browsers do not show."""
    small = _in_colour(image)
    small.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
    path = beside.with_name(f"{beside.stem}.preview.webp")
    small.save(path, "WEBP", quality=85)
    return str(path)


def _in_colour(image: Image.Image) -> Image.Image:
    """Deep grey, which Pillow would cut off, is spread over what there is."""
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, dtype=np.float64)
        values = (values - values.min()) / max(float(np.ptp(values)), 1e-9) * 255.0
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")
