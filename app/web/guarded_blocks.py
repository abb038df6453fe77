"""Gradio's page as ours: values of events are looked at before anything opens the files they speak of."""

from typing import Any

import gradio as gr

from app.web.uploads import ForeignFileError, refuse_foreign_files

_FOREIGN = "Only files that were uploaded on this page can be used; choose the file again."


class GuardedBlocks(gr.Blocks):
    """A page that takes no file but uploaded ones, whatever an event claims."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As Gradio's, after the check. It runs for every event, before components see their values."""
        try:
            refuse_foreign_files(inputs)
        except ForeignFileError:
            raise gr.Error(_FOREIGN, print_exception=False) from None  # nothing of what was sent gets into the log
        result: list[Any] = await super().preprocess_data(block_fn, inputs, *args, **kwargs)
        return result
