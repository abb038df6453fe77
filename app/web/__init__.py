"""The web page, the only room that imports Gradio. Importing it imports Gradio without its reports and stub files."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Read when Gradio and the Hugging Face hub client are imported: no telemetry.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Statistics of events, which are not used here; Gradio would recompute them after every event.
os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(2**62)


@contextmanager
def no_stub_files() -> Iterator[None]:
    """Keep `import gradio` from writing a file of types (.pyi) beside each component, which takes a third of its time.

    It asks `inspect.getfile` where a component is written, and leaves out what has no file.
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
