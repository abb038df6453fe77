"""Parts that the tabs share, in Gradio: strips of buttons, plain HTML, and how events are connected."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component
from PIL import Image

from llama_adapter.app.web.escaping import escaped
from llama_adapter.app.web.thumbnails import data_address
from llama_adapter.app.web.uploads import place_in_uploads

# For every event: not offered to programs, and no veil over what it changes.
CLOSED: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
# For those that do not stream: a plain request and its answer. Gradio closes a page's stream of news when nothing is
# under way, and an event that is sent at that moment waits for its news until the next one opens another stream.
AT_ONCE: dict[str, Any] = {"queue": False, **CLOSED}

_SAMPLE_SIDE = 96  # pixels

OnOpening = tuple[Component, Callable[[], Any]]  # what a component shows is made when a page is opened

_TELL_WHICH = """
element.addEventListener('click', (event) => {
    const button = event.target.closest('button[data-index]');
    if (button) trigger('click', {index: Number(button.dataset.index)});
});
"""


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
            small = image.convert("RGB")
        small.thumbnail((_SAMPLE_SIDE, _SAMPLE_SIDE))
        address = data_address(small)
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
