"""The requests of each open page, so that Stop and closing the page cancel them, and the figures of its runs.

Imports no Gradio.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.web.run_history import RunFigures

MAX_HISTORIES: Final = 256  # pages whose figures are kept; the oldest are deleted
MAX_RUNS: Final = 30  # whose figures a page keeps; the oldest are deleted


class Run:
    """The requests that one press of a button causes. `stop` cancels them and all later ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, RequestHandle] = {}
        self.is_stopped = False  # whether Stop was pressed or the page closed
        self.is_left = False  # whether the page was closed

    def add(self, handle: RequestHandle) -> None:
        """Cancel this request when the run is stopped, or at once if it already is."""
        with self._lock:
            self._handles[handle.id] = handle
            is_late = self.is_stopped
        if is_late:
            handle.cancel()

    def discard(self, handle: RequestHandle) -> None:
        """Remove a request that is answered."""
        with self._lock:
            self._handles.pop(handle.id, None)

    def stop(self) -> None:
        """Cancel all requests. May be called again."""
        with self._lock:
            self.is_stopped = True
            handles = list(self._handles.values())
        for handle in handles:
            handle.cancel()


class Runs:
    """The current runs of all open pages, at most one per page and tab, and the figures of finished runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, str], Run] = {}
        self._histories: OrderedDict[str, deque[RunFigures]] = OrderedDict()

    def history(self, session: str) -> deque[RunFigures]:
        """The figures of this page's runs, oldest first. Pages do not see each other's figures."""
        with self._lock:
            history = self._histories.setdefault(session, deque(maxlen=MAX_RUNS))
            while len(self._histories) > MAX_HISTORIES:
                self._histories.popitem(last=False)
        return history

    def leave(self, session: str) -> None:
        """The page was closed: stop its runs and delete their figures."""
        with self._lock:
            self._histories.pop(session, None)
            for run in self._of(session):
                run.is_left = True
        self.stop(session)

    @contextmanager
    def open(self, session: str, tab: str) -> Iterator[Run]:
        """A new run of this page and tab. An earlier run is stopped first; at the end of the context, this one is."""
        run = Run()
        with self._lock:
            earlier = self._runs.get((session, tab))
            self._runs[session, tab] = run
        if earlier is not None:
            earlier.stop()
        try:
            yield run
        finally:
            run.stop()
            with self._lock:
                if self._runs.get((session, tab)) is run:
                    del self._runs[session, tab]

    def stop(self, session: str, tab: str | None = None) -> None:
        """Stop this page's run in one tab, or in all tabs."""
        with self._lock:
            runs = self._of(session, tab)
        for run in runs:
            run.stop()

    def _of(self, session: str, tab: str | None = None) -> list[Run]:
        return [run for (owner, place), run in self._runs.items() if owner == session and tab in (None, place)]
