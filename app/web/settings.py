"""The settings of an answer as controls, and their values as the engine takes them."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from llama_adapter.llm.engine.sampling_params import SamplingParams

MOST_TOKENS = 512
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsControls:
    """The controls in the order in which `sampling_of` takes their values."""

    max_new_tokens: gr.Slider
    temperature: gr.Slider
    top_p: gr.Slider
    top_k: gr.Number
    seed: gr.Textbox

    def as_inputs(self) -> list[Any]:
        """For the inputs of an event."""
        return [self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed]


def build_settings() -> SettingsControls:
    """Lay out an accordion, closed at first."""
    with gr.Accordion("Settings", open=False, elem_classes="la-settings"):
        max_new_tokens = gr.Slider(
            1, MOST_TOKENS, value=_DEFAULTS.max_new_tokens, step=1, label="Most tokens", info="An answer ends here."
        )
        temperature = gr.Slider(
            0, 2, value=_DEFAULTS.temperature, step=0.05, label="Temperature", info="0: always the likeliest word."
        )
        top_p = gr.Slider(
            0,
            1,
            value=_DEFAULTS.top_p,
            step=0.01,
            label="Top p",
            info="Draw from this share of words only.",
        )
        with gr.Row():
            top_k = gr.Number(
                value=_DEFAULTS.top_k, minimum=0, precision=0, label="Top k", info="0: all words.", min_width=120
            )
            # A box of numbers would show 0 where there is none.
            seed = gr.Textbox(
                label="Seed", info="The same seed, the same answer.", placeholder="none", max_length=20, min_width=120
            )
    return SettingsControls(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def sampling_of(max_new_tokens: Any, temperature: Any, top_p: Any, top_k: Any, seed: Any) -> SamplingParams:
    """Values as a browser sent them. Raises ValueError for what is no number or out of range."""
    params = SamplingParams(
        max_new_tokens=_whole(max_new_tokens),
        temperature=temperature,
        top_p=top_p,
        top_k=_whole(0 if top_k is None else top_k),
        seed=_seed(seed),
    )
    if not 1 <= params.max_new_tokens <= MOST_TOKENS:
        raise ValueError(f"Most tokens must lie in 1..{MOST_TOKENS}, got {params.max_new_tokens}")
    return params


def _seed(value: Any) -> int | None:
    text = str(value if value is not None else "").strip()
    if text and not text.removeprefix("-").isdecimal():
        raise ValueError(f"The seed must be a whole number or empty, got {text[:20]!r}")
    return int(text) if text else None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
