"""What each open page is waiting for, so that Stop and closing the page cancel it. No Gradio, no model."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llama_adapter.app.online.request_handle import RequestHandle


class Run:
    """One press of a button: its handles under way. Stopping it cancels them, and those that come after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, RequestHandle] = {}
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether Stop was pressed or the page closed."""
        return self._is_stopped

    def add(self, handle: RequestHandle) -> None:
        """Cancel this one too when the run stops; at once, if it has been stopped."""
        with self._lock:
            self._handles[handle.id] = handle
            is_late = self._is_stopped
        if is_late:
            handle.cancel()

    def discard(self, handle: RequestHandle) -> None:
        """It is answered."""
        with self._lock:
            self._handles.pop(handle.id, None)

    def stop(self) -> None:
        """Cancel what is under way. Harmless when repeated."""
        with self._lock:
            self._is_stopped = True
            handles = list(self._handles.values())
        for handle in handles:
            handle.cancel()


class Runs:
    """The runs of all open pages: at most one for each page and tab, and none that has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, str], Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    @contextmanager
    def open(self, session: str, tab: str) -> Iterator[Run]:
        """A new run of this page and tab; one that is still under way is stopped. At the end, what is left is too."""
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
        """Stop this page's run in a tab, or in all of them."""
        with self._lock:
            runs = [run for (owner, place), run in self._runs.items() if owner == session and tab in (None, place)]
        for run in runs:
            run.stop()
