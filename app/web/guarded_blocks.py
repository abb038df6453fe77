"""Gradio's page as ours: values of events are looked at before anything opens the files they speak of."""

from typing import Any

import gradio as gr

from app.web.uploads import refuse_foreign_files


class GuardedBlocks(gr.Blocks):
    """A page that takes no file but uploaded ones, whatever an event claims."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As Gradio's, after the check. It runs for every event, before components see their values."""
        refuse_foreign_files(inputs)
        result: list[Any] = await super().preprocess_data(block_fn, inputs, *args, **kwargs)
        return result
