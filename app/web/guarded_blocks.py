"""Gradio's page as ours: what events bring is checked before it is used, and what fails is logged without it."""

import logging
import time
from typing import Any

import gradio as gr

from llama_adapter.app.http_api.access import kind_and_place
from llama_adapter.app.web.uploads import ForeignFileError, refuse_foreign_files

_log = logging.getLogger("llama_adapter")

_FOREIGN = "Only files that were uploaded on this page can be used; choose the file again."
MAX_FAULT_LINES_A_MINUTE = 60


class GuardedBlocks(gr.Blocks):
    """A page that takes no file but uploaded ones, and whose log has nothing of what events brought.

    Gradio prints a traceback for every event that fails, and its messages quote the values of the event.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._faults = FaultLog()

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Gradio's. A failure is answered in the same way, and logged by its kind and place alone."""
        try:
            result: dict[str, Any] = await super().process_api(*args, **kwargs)
        except gr.Error as error:
            if error.print_exception:
                self._faults.tell(error)
                error.print_exception = False
            raise
        except Exception as error:
            self._faults.tell(error)
            raise _UntoldError from None
        return result

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As Gradio's, after the check. It runs for every event, before components see their values."""
        try:
            refuse_foreign_files(inputs)
        except ForeignFileError:
            raise gr.Error(_FOREIGN, print_exception=False) from None  # nothing of what was sent gets into the log
        result: list[Any] = await super().preprocess_data(block_fn, inputs, *args, **kwargs)
        return result


class FaultLog:
    """A line for each event that failed, at most `MAX_FAULT_LINES_A_MINUTE`; the others are counted."""

    def __init__(self) -> None:
        self._minute = self._num_faults = 0

    def tell(self, error: Exception) -> None:
        """Log the kind and place of a fault. Its message may quote what was sent, so it is left out."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            num_untold = self._num_faults - MAX_FAULT_LINES_A_MINUTE
            if num_untold > 0:
                _log.error("page: %d more events failed in the same minute", num_untold)
            self._minute, self._num_faults = minute, 0
        self._num_faults += 1
        if self._num_faults <= MAX_FAULT_LINES_A_MINUTE:
            _log.error("page: an event failed: %s", kind_and_place(error))


class _UntoldError(gr.Error):
    """Gradio prints no traceback of it, and answers with an error of null, as for any other exception."""

    def __init__(self) -> None:
        super().__init__(print_exception=False)
        self.message = None
