"""Captioning and questioning pictures with LLaMA-Adapter models: `from llama_adapter import Captioner`.

In a checkout, its folders `app`, `vision`, `llm`, `runtime` and `assets` are links to those at the root.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_adapter.app.captioning.captioner import Answer, Captioner, Dialogue, RawPrompt, TextDelta
    from llama_adapter.app.captioning.tasks.answers import answers_to_pandas
    from llama_adapter.app.captioning.tasks.registry import get_task, tasks
    from llama_adapter.app.command_line.main import load_settings
    from llama_adapter.app.compat.infer_config import InferConfig
    from llama_adapter.app.compat.model_runner import ModelRunner
    from llama_adapter.app.compat.pipeline import InferTask, pipeline
    from llama_adapter.app.compat.streamer import TextIteratorStreamer, TextStreamer
    from llama_adapter.llm.errors import PromptError, PromptTooLongError
    from llama_adapter.runtime.errors import CheckpointError, DeviceError, GraphError, LlamaAdapterError, UsageError
    from llama_adapter.vision.errors import PictureError

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Captioner",
    "CheckpointError",
    "DeviceError",
    "Dialogue",
    "GraphError",
    "InferConfig",
    "InferTask",
    "LlamaAdapterError",
    "ModelRunner",
    "PictureError",
    "PromptError",
    "PromptTooLongError",
    "RawPrompt",
    "TextDelta",
    "TextIteratorStreamer",
    "TextStreamer",
    "UsageError",
    "__version__",
    "answers_to_pandas",
    "get_task",
    "load_settings",
    "pipeline",
    "tasks",
]

if sys.version_info < (3, 11):  # noqa: UP036 - a checkout can be run by any Python
    raise ImportError(f"llama_adapter needs Python 3.11 or newer, and this is {sys.version.split()[0]}.")
if sys.platform == "win32":
    raise ImportError("llama_adapter does not run on Windows itself. Install it inside WSL 2: `wsl --install`.")
for _folder in ("app", "assets", "llm", "runtime", "vision"):
    if not Path(__file__).with_name(_folder).is_dir():
        raise ImportError(
            f"llama_adapter/{_folder} is not a folder. In a checkout it is a symbolic link to {_folder}/, and this "
            "checkout has no symbolic links. Clone it again with `git clone -c core.symlinks=true`, or install a wheel."
        )

# Public names that are loaded on first use, so that `llama-adapter --help` does not wait for torch.
_HOMES = {
    "llama_adapter.app.captioning.captioner": ("Answer", "Captioner", "Dialogue", "RawPrompt", "TextDelta"),
    "llama_adapter.app.command_line.main": ("load_settings",),
    "llama_adapter.app.compat.infer_config": ("InferConfig",),
    "llama_adapter.app.compat.model_runner": ("ModelRunner",),
    "llama_adapter.app.compat.pipeline": ("InferTask", "pipeline"),
    "llama_adapter.app.compat.streamer": ("TextIteratorStreamer", "TextStreamer"),
    "llama_adapter.app.captioning.tasks.answers": ("answers_to_pandas",),
    "llama_adapter.app.captioning.tasks.registry": ("get_task", "tasks"),
    "llama_adapter.llm.errors": ("PromptError", "PromptTooLongError"),
    "llama_adapter.runtime.errors": (
        "CheckpointError",
        "DeviceError",
        "GraphError",
        "LlamaAdapterError",
        "UsageError",
    ),
    "llama_adapter.vision.errors": ("PictureError",),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            try:
                return getattr(importlib.import_module(home), name)
            except RuntimeError as error:
                from llama_adapter.runtime.torch_import import note_torch_import

                note_torch_import(error)
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
