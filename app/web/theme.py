"""The look of the page: a theme with system fonts, and the style sheet beside this file."""

from pathlib import Path

import gradio as gr
from gradio.themes.utils import colors

STYLES = (Path(__file__).with_name("style.css"),)

_SYSTEM = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


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
    return theme.set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        block_border_color="*neutral_200",
        block_border_color_dark="*neutral_800",
        block_border_width="1px",
        block_shadow="none",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_200",
        block_title_text_weight="600",
        block_title_text_color="*neutral_800",
        block_title_text_color_dark="*neutral_100",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        input_background_fill="white",
        input_background_fill_dark="*neutral_950",
        input_border_color="*neutral_400",
        input_border_color_dark="*neutral_600",
        input_border_width="1px",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_400",
        button_primary_background_fill_hover_dark="*primary_300",
        button_primary_text_color="white",
        button_primary_text_color_dark="*neutral_950",
        button_secondary_background_fill="white",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_background_fill_hover_dark="*neutral_700",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_600",
        button_secondary_text_color="*neutral_900",
        button_secondary_text_color_dark="*neutral_50",
        button_border_width="1px",
        button_cancel_background_fill="white",
        button_cancel_background_fill_hover="#fef2f2",
        button_cancel_background_fill_dark="*neutral_800",
        button_cancel_background_fill_hover_dark="#450a0a",
        button_cancel_text_color="#b91c1c",
        button_cancel_text_color_dark="#fca5a5",
        button_cancel_border_color="#fca5a5",
        button_cancel_border_color_dark="#7f1d1d",
        link_text_color="*primary_700",
        link_text_color_hover="*primary_800",
        link_text_color_dark="*primary_300",
        link_text_color_hover_dark="*primary_200",
        color_accent="*primary_600",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
    )
