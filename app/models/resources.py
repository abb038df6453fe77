"""Paths of the packaged files: the embedded model, the tower that its training starts from, and sample pictures."""

from pathlib import Path

import llama_adapter

# In a checkout, this is a link to the folder `assets` at the root; in a wheel, it is the folder itself.
_ASSETS = (Path(llama_adapter.__file__).parent / "assets").resolve()


def embedded_model() -> Path:
    """The bundle of the embedded model."""
    return _ASSETS / "embedded"


def start_tower() -> Path:
    """The weights that the embedded model's picture tower starts its training with, float16.

    Patches are those of pictures of half the size.
    """
    return _ASSETS / "start-tower.safetensors"


def sample_pictures() -> Path:
    """The folder of sample pictures."""
    return _ASSETS / "pictures"
