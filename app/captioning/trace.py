"""A trace of stages and operators, for Perfetto and chrome://tracing."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final

from llama_adapter.runtime.problems import describe

MAX_SPANS: Final = 1000  # some seconds of a large model; viewers cannot open a trace of a whole folder
PREFIX: Final = "stage "


class Trace:
    """Records the device's operators from the first stage on, with each stage as a span.

    After `max_spans` stages, or at `close`, the trace is written, and the run continues without tracing. If the trace
    cannot be written, `tell` reports it and the run continues. Only stages of the thread that made the trace are
    recorded: torch crashes if a profiler ends in another thread than the one it began in.
    """

    def __init__(
        self,
        profiler: Callable[[Path], AbstractContextManager[Any]],
        folder: Path,
        *,
        tell: Callable[[str], None],
        max_spans: int = MAX_SPANS,
    ) -> None:
        """`profiler` is the profiler of a backend. `tell` is called with notes for the user."""
        self._profiler, self._folder, self._tell = profiler, folder, tell
        self._left = max_spans
        self._thread, self._is_elsewhere = threading.get_ident(), False
        self._running: ExitStack | None = None
        self._span: Any = None

    def enter(self, stage: str | None) -> None:
        """End the current span and begin one for `stage`; with None, no span begins."""
        if threading.get_ident() != self._thread:
            self._is_elsewhere = True
            return
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        if stage is None:
            return
        if self._left == 0:
            self.close()
            return
        self._left -= 1
        if self._running is None:
            self._running = ExitStack()
            self._running.enter_context(self._profiler(self._folder))
        import torch  # imported here: exported models run without torch, and without a trace

        self._span = torch.profiler.record_function(PREFIX + stage)
        self._span.__enter__()

    def close(self) -> None:
        """Write the trace. Can be called again."""
        self.enter(None)
        running, self._running, self._left = self._running, None, 0
        if running is None:
            if self._is_elsewhere:
                self._is_elsewhere = False
                self._tell("note: no trace was written: another thread answered, as `agenerate` and `astream` do")
            return
        try:
            running.close()
        except Exception as error:  # raised by the profiler, or by a full disk
            self._tell(f"note: no trace was written to `{self._folder}`: {describe(error).sentence}")
        else:
            self._tell(f"trace in `{self._folder}`: open it with https://ui.perfetto.dev or chrome://tracing")
