"""An uploaded picture as its user sees it: what a browser's value stands for, size, preview. No Gradio."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from llama_adapter.app.online.reading_pool import ReadingDroppedError
from llama_adapter.app.online.service import BusyError, Service, UnavailableError
from llama_adapter.app.reading.process_pool import ReadingProcessError
from llama_adapter.app.web.chat_state import PickedPicture
from llama_adapter.app.web.uploads import read_upload, uploaded
from llama_adapter.vision.errors import PictureError

File = tuple[str, str]  # path of an uploaded file, and its name on the user's disk

_SHOWN_BY_BROWSERS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")
_PREVIEW_SIDE = 1024  # pixels
_NOT_LOOKED_AT = "The server could not read the picture in time; choose it again later."


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


async def look(
    service: Service, file: File, *, client: str, is_wanted: Callable[[], bool] = lambda: True
) -> PickedPicture:
    """What a picture is, or why it cannot be read. The reading ends when `is_wanted` returns False."""
    path, name = file
    try:
        data = await asyncio.to_thread(read_upload, path, max_bytes=service.limits.max_picture_bytes)
        reading = service.view(data, name=name, side=_PREVIEW_SIDE, client=client, is_wanted=is_wanted)
        view = await asyncio.wait_for(asyncio.wrap_future(reading), service.limits.timeout_s)
    except (PictureError, UnavailableError, BusyError) as error:
        return PickedPicture(source=path, shown=path, name=name, problem=error.message)
    except (TimeoutError, ReadingDroppedError, ReadingProcessError):
        return PickedPicture(source=path, shown=path, name=name, problem=_NOT_LOOKED_AT)
    if view.pixels is None:
        problem = _NOT_LOOKED_AT if view.error is None else view.error.message
        return PickedPicture(source=path, shown=path, name=name, problem=problem)
    shown = path
    if Path(path).suffix.lower() not in _SHOWN_BY_BROWSERS:
        shown = await asyncio.to_thread(_preview, view.pixels, beside=Path(path))
    return PickedPicture(source=path, shown=shown, name=name, width=view.width, height=view.height, num_bytes=len(data))


def _preview(pixels: np.ndarray, *, beside: Path) -> str:
    """A WebP file in the same folder, for formats that browsers do not show."""
    path = beside.with_name(f"{beside.stem}.preview.webp")
    Image.fromarray(pixels).save(path, "WEBP", quality=85)
    return str(path)
