"""The look of the page: a theme with system fonts, and the style sheet beside this file."""

from pathlib import Path

import gradio as gr
from gradio.themes.utils import colors

STYLES = (Path(__file__).with_name("style.css"),)

_SYSTEM = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
_COLOURS = {  # by Gradio's name: light, dark
    "body_background_fill": ("*neutral_50", "*neutral_950"),
    "block_background_fill": ("white", "*neutral_900"),
    "block_border_color": ("*neutral_200", "*neutral_800"),
    "block_label_text_color": ("*neutral_700", "*neutral_200"),
    "block_title_text_color": ("*neutral_800", "*neutral_100"),
    "block_info_text_color": ("*neutral_600", "*neutral_400"),
    "body_text_color_subdued": ("*neutral_600", "*neutral_400"),
    "input_background_fill": ("white", "*neutral_950"),
    "input_border_color": ("*neutral_400", "*neutral_600"),
    "input_placeholder_color": ("*neutral_500", "*neutral_400"),
    "button_primary_background_fill": ("*primary_700", "*primary_400"),
    "button_primary_background_fill_hover": ("*primary_800", "*primary_300"),
    "button_primary_text_color": ("white", "*neutral_950"),
    "button_secondary_background_fill": ("white", "*neutral_800"),
    "button_secondary_background_fill_hover": ("*neutral_100", "*neutral_700"),
    "button_secondary_border_color": ("*neutral_300", "*neutral_600"),
    "button_secondary_text_color": ("*neutral_900", "*neutral_50"),
    "button_cancel_background_fill": ("white", "*neutral_800"),
    "button_cancel_background_fill_hover": ("#fef2f2", "#450a0a"),
    "button_cancel_text_color": ("#b91c1c", "#fca5a5"),
    "button_cancel_border_color": ("#fca5a5", "#7f1d1d"),
    "link_text_color": ("*primary_700", "*primary_300"),
    "link_text_color_hover": ("*primary_800", "*primary_200"),
    "slider_color": ("*primary_600", "*primary_400"),
}


def build_theme() -> gr.themes.Base:
    """Teal on slate, light and dark; nothing is loaded from the network."""
    theme = gr.themes.Base(
        primary_hue=colors.teal,
        secondary_hue=colors.teal,
        neutral_hue=colors.slate,
        radius_size=gr.themes.sizes.radius_lg,
        font=_SYSTEM,
        font_mono=_MONO,
    )
    dark = {f"{name}_dark": colour for name, (_, colour) in _COLOURS.items()}
    return theme.set(
        block_border_width="1px",
        block_shadow="none",
        block_title_text_weight="600",
        input_border_width="1px",
        button_border_width="1px",
        color_accent="*primary_600",
        **{name: colour for name, (colour, _) in _COLOURS.items()},
        **dark,
    )
