"""Where pictures come in: one, many, or a sample. Bytes stay as they were uploaded; nothing is opened on the way."""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from gradio.components import Component
from PIL import Image

from app.service import ServiceLimits
from app.web.chat_state import PickedPicture
from app.web.escaping import escaped
from app.web.uploads import place_in_uploads, read_upload, uploaded
from vision.errors import PictureError
from vision.image import load_picture

_SHOWN_BY_BROWSERS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")
# For every event: not offered to programs, and no veil over what it changes.
CLOSED: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
# For those that do not stream: a plain request and its answer. Gradio closes a page's stream of news when nothing is
# under way, and an event that is sent at that moment waits for its news until the next one opens another stream.
AT_ONCE: dict[str, Any] = {"queue": False, **CLOSED}

OnOpening = tuple[Component, Callable[[], Any]]  # what a component shows is made when a page is opened

File = tuple[str, str]  # path of an uploaded file, and its name on the user's disk

_PREVIEW_SIDE = 1024  # pixels
_TELL_WHICH = """
element.addEventListener('click', (event) => {
    const button = event.target.closest('button[data-index]');
    if (button) trigger('click', {index: Number(button.dataset.index)});
});
"""


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
        width, height = _size_upright(data)
    except PictureError as error:
        return PickedPicture(source=path, shown=path, name=name, problem=error.message)
    shown = path if Path(path).suffix.lower() in _SHOWN_BY_BROWSERS else _preview(loaded.image, beside=Path(path))
    return PickedPicture(source=path, shown=shown, name=name, width=width, height=height, num_bytes=len(data))


def thumbnail(image: Image.Image, *, side: int) -> str:
    """A small picture as a `data:` address, to stand inside HTML; `side` is its longer one, in pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def sample_name(path: Path) -> str:
    """`12-red-star.jpg` -> `red star`."""
    words = path.stem.split("-")
    return " ".join(words[1:] if words[0].isdigit() and len(words) > 1 else words)


def picker(value: str, *, elem_id: str) -> gr.HTML:
    """A strip of buttons in HTML; pressing one is a `click` event whose `index` says which."""
    return gr.HTML(value, js_on_load=_TELL_WHICH, elem_id=elem_id, apply_default_css=False)


def plain(value: str | Callable[[], str], *, elem_id: str | None = None) -> gr.HTML:
    """HTML that only shows something, in our style; a function is called whenever a page is opened."""
    return gr.HTML(value, js_on_load=None, elem_id=elem_id, apply_default_css=False)


def picked(event: gr.EventData, *, count: int) -> int | None:
    """The index that a picker's event speaks of, or None for one that does not exist."""
    index = event._data.get("index") if isinstance(event._data, dict) else None
    return index if isinstance(index, int) and 0 <= index < count else None


def sample_strip(samples: Sequence[Path]) -> str:
    """The sample pictures as buttons."""
    buttons = []
    for index, path in enumerate(samples):
        with Image.open(path) as image:
            address = thumbnail(image, side=96)
        name = escaped(sample_name(path))
        buttons.append(
            f'<button type="button" class="la-sample" data-index="{index}" aria-label="Sample picture: {name}" '
            f'title="{name}"><img src="{address}" alt="" width="56" height="56"></button>'
        )
    return f'<div class="la-samples" role="group" aria-label="Sample pictures">{"".join(buttons)}</div>'


def chips(labels: Sequence[tuple[str, str]], *, name: str) -> str:
    """Questions to start from as buttons, from (label, text) pairs."""
    buttons = "".join(
        f'<button type="button" class="la-chip" data-index="{index}" title="{escaped(text)}">{escaped(label)}</button>'
        for index, (label, text) in enumerate(labels)
    )
    return f'<div class="la-chips" role="group" aria-label="{escaped(name)}">{buttons}</div>'


def sample_upload(samples: Sequence[Path], index: int) -> str:
    """The sample as an uploaded file; copied again where it was cleaned away."""
    return place_in_uploads(samples[index])


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
