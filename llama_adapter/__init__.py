"""Captioning and questioning pictures with LLaMA-Adapter models: `from llama_adapter import Captioner`.

The folders `app`, `vision`, `llm` and `runtime` of a checkout are links to those at its root; a wheel holds them as
folders of this package.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_adapter.app.captioning.captioner import Answer, Captioner, RawPrompt, TextDelta

__version__ = "0.1.0"
__all__ = ["Answer", "Captioner", "RawPrompt", "TextDelta", "__version__"]

for _part in ("app", "assets", "llm", "runtime", "vision"):
    if not Path(__file__).with_name(_part).is_dir():
        raise ImportError(
            f"llama_adapter/{_part} is not a link to {_part}/: this checkout has no symbolic links. "
            "Clone it again with `git clone -c core.symlinks=true`, or install a wheel."
        )


def __getattr__(name: str) -> object:
    # Loaded on first use: `llama-adapter --help` must not wait for torch.
    if name in __all__:
        from llama_adapter.runtime.torch_import import note_torch_import

        try:
            from llama_adapter.app.captioning import captioner
        except RuntimeError as error:
            note_torch_import(error)
            raise
        return getattr(captioner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
