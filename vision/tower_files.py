"""Finds the weight files of a picture tower. Imports no torch."""

import os
from pathlib import Path
from typing import Final

from llama_adapter.runtime.errors import CheckpointError

_FILES: Final = (
    *("model.safetensors", "pytorch_model.bin"),
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
    *("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin"),  # shards
)


def clip_files(path: str | os.PathLike[str]) -> list[Path]:
    """The weight files of a tower at `path`, which is a file or a folder in the form of Hugging Face or open_clip.

    Several files are the shards of one. Raises CheckpointError if there is none.
    """
    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"There is no CLIP at `{place}`", hint="pass OpenAI's ViT-L-14.pt as --clip")
    if not place.is_dir():
        return [place]
    files = next(filter(None, (sorted(place.glob(name)) for name in _FILES)), [])
    if not files:
        raise CheckpointError(
            f"The folder `{place}` holds no CLIP",
            hint="wanted: model.safetensors or pytorch_model.bin, open_clip's files, a bundle, or a file",
        )
    return files
