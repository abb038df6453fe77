"""The web page, the only package that imports Gradio. It turns off Gradio's telemetry and its writing of stub files."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Turns off telemetry. Gradio and the Hugging Face hub client read it when they are imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Limits Gradio's statistics of events, which this page does not use. Otherwise Gradio recomputes them at every event.
os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(2**62)


@contextmanager
def no_stub_files() -> Iterator[None]:
    """Keep `import gradio` from writing a stub file (.pyi) for each component, which takes a third of its time.

    Gradio calls `inspect.getfile` to find the file of a component, and skips components without a file.
    """
    getfile = inspect.getfile

    def getfile_of_others(object: Any) -> str:
        if isinstance(object, type) and object.__module__.startswith("gradio."):
            raise OSError("no stub file is wanted")
        return getfile(object)

    inspect.getfile = getfile_of_others
    try:
        yield
    finally:
        inspect.getfile = getfile


with no_stub_files():
    import gradio  # noqa: F401
