"""Composition and front ends: `from app import Captioner`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.captioner import Answer, Captioner, RawPrompt, TextDelta

__all__ = ["Answer", "Captioner", "RawPrompt", "TextDelta"]


def __getattr__(name: str) -> object:
    # Loaded on first use: `llama-adapter --help` must not wait for torch.
    if name in __all__:
        from app.startup import note_torch_import

        try:
            from app import captioner
        except RuntimeError as error:
            note_torch_import(error)
            raise
        return getattr(captioner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
