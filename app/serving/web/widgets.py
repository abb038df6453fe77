"""Gradio widgets that several tabs use: HTML, sample pictures, the settings of an answer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import gradio as gr
from gradio.components import Component
from PIL import Image

from llama_adapter.app.pictures.reading.views import data_address
from llama_adapter.app.serving.http_api.schemas import as_whole
from llama_adapter.app.serving.web.html import render
from llama_adapter.app.serving.web.uploads import Upload, uploads_of
from llama_adapter.llm.engine.sampling_params import SamplingParams

# For every event: it is not part of Gradio's API, and shows no progress overlay on its outputs.
PRIVATE: Final[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden"}
# For events that do not stream: a plain request and its answer, without Gradio's queue. Gradio closes a page's event
# stream when nothing runs. An event that is queued at that moment gets no updates until another event opens a stream.
DIRECT: Final[dict[str, Any]] = {"queue": False, **PRIVATE}
MAX_NEW_TOKENS: Final = 512
SESSION_SECONDS: Final = 6 * 3600  # a page that is not used for this time loses its chat and its batch

_SAMPLE_SIDE: Final = 96  # pixels
_DEFAULTS: Final = SamplingParams()
_PENALTIES: Final = {
    "Presence": "Above 0: against words that the answer has.",
    "Frequency": "Above 0: against words that it repeats.",
}
_BUTTONS: Final = Path(__file__).with_name("buttons.js").read_text(encoding="utf-8")
_PICK: Final = Path(__file__).with_name("picker.js").read_text(encoding="utf-8")

OnOpening = tuple[Component, Callable[[], Any]]  # a component, and the function for its value on opening


def html_view(value: str, *, elem_id: str | None = None) -> gr.HTML:
    """HTML without events, in the page's style."""
    return gr.HTML(value, js_on_load=None, elem_id=elem_id, apply_default_css=False)


def html_list(*, elem_id: str) -> gr.HTML:
    """HTML as a list of strings; only strings that change are sent to the browser."""
    return gr.HTML([], html_template="${value.join('')}", js_on_load=None, elem_id=elem_id, apply_default_css=False)


def html_buttons(value: str, *, elem_id: str) -> gr.HTML:
    """Buttons in HTML; pressing one is a `click` event whose `index` is the button's `data-index`.

    The Tab key stops once at the buttons of a toolbar. Arrow keys, Home and End go from one of them to another.
    """
    return gr.HTML(value, js_on_load=_BUTTONS, elem_id=elem_id, apply_default_css=False)


def html_picker(value: str, *, elem_id: str) -> gr.HTML:
    """Files to add: `value` is the macro `picker` of `parts.html`. `picked` reads its event `upload`."""
    return gr.HTML(value, js_on_load=_PICK, elem_id=elem_id, apply_default_css=False)


def picked(event: gr.EventData) -> tuple[list[Upload], list[str]]:
    """The files that an `html_picker` uploaded, and sentences about those that it did not upload."""
    data = event._data if isinstance(event._data, dict) else {}
    refused = data.get("refused")
    sentences = [one[:300] for one in (refused if isinstance(refused, list) else [])[:20] if isinstance(one, str)]
    return uploads_of(data.get("files")), sentences


def pressed(event: gr.EventData, *, count: int) -> int | None:
    """The index of a click on `html_buttons`, or None unless it is in 0..count - 1."""
    index = event._data.get("index") if isinstance(event._data, dict) else None
    return index if isinstance(index, int) and 0 <= index < count else None


def sample_strip(samples: Sequence[Path]) -> str:
    """The sample pictures as buttons."""
    pictures = []
    for path in samples:
        with Image.open(path) as image:
            small = image.convert("RGB")
        small.thumbnail((_SAMPLE_SIDE, _SAMPLE_SIDE))
        pictures.append((sample_name(path), data_address(small)))
    return render("parts", "samples", pictures=pictures)


def sample_name(path: Path) -> str:
    """The content of a sample picture, from its file name: `12-red-star.jpg` -> `red star`."""
    words = path.stem.split("-")
    return " ".join(words[1:] if words[0].isdigit() and len(words) > 1 else words)


def share_slider(label: str, *, value: float, info: str) -> gr.Slider:
    """A slider from 0 to 1."""
    return gr.Slider(0, 1, value=value, step=0.01, label=label, info=info)


def build_settings(first: Component | None = None) -> list[Component]:
    """Lay out the settings of an answer in a closed accordion. Their values are the arguments of `sampling_of`.

    `first` is laid out above them, and is not in the returned list.
    """
    with gr.Accordion("Settings", open=False, elem_classes="la-settings"):
        if first is not None:
            first.render()  # type: ignore[no-untyped-call]
        max_new_tokens = gr.Slider(
            1,
            MAX_NEW_TOKENS,
            value=_DEFAULTS.max_new_tokens,
            step=1,
            label="Maximum tokens",
            info="The answer ends here at the latest.",
        )
        temperature = gr.Slider(
            0, 2, value=_DEFAULTS.temperature, step=0.05, label="Temperature", info="0: always the most likely token."
        )
        info = "Sample from the most likely tokens up to this total probability."
        top_p = share_slider("Top p", value=_DEFAULTS.top_p, info=info)
        info = "Drop tokens less likely than this share of the likeliest one's probability."
        min_p = share_slider("Min p", value=_DEFAULTS.min_p, info=info)
        with gr.Row():
            presence, frequency = (
                gr.Slider(-2, 2, value=0.0, step=0.1, label=f"{name} penalty", info=info, min_width=120)
                for name, info in _PENALTIES.items()
            )
        with gr.Row():
            top_k = gr.Number(
                value=_DEFAULTS.top_k, minimum=0, precision=0, label="Top k", info="0: all tokens.", min_width=120
            )
            # A number box would show 0 for an empty value.
            seed = gr.Textbox(
                label="Seed",
                info="The same seed gives the same answer.",
                placeholder="none",
                max_length=20,
                min_width=120,
            )
    return [max_new_tokens, temperature, top_p, top_k, seed, min_p, presence, frequency]


def sampling_of(
    max_new_tokens: Any,
    temperature: Any,
    top_p: Any,
    top_k: Any,
    seed: Any,
    min_p: Any = 0.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
) -> SamplingParams:
    """Sampling parameters from the values that a browser sent. Raises ValueError for a wrong type or range."""
    params = SamplingParams(
        max_new_tokens=as_whole(max_new_tokens),
        temperature=temperature,
        top_p=top_p,
        top_k=as_whole(0 if top_k is None else top_k),
        seed=_seed(seed),
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    if not 1 <= params.max_new_tokens <= MAX_NEW_TOKENS:
        raise ValueError(f"Maximum tokens must be in 1..{MAX_NEW_TOKENS}, got {params.max_new_tokens}")
    return params


def _seed(value: Any) -> int | None:
    text = str(value if value is not None else "").strip()
    if text and not text.removeprefix("-").isdecimal():
        raise ValueError(f"The seed must be a whole number or empty, got {text[:20]!r}")
    return int(text) if text else None
