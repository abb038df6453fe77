"""Which models see pictures as tokens of their prompts: those with a tower, a connector and a decoder in one folder.

Imports no torch: commands ask before they load a model.
"""

from pathlib import Path
from typing import Final

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import CheckpointError

KINDS: Final = ("llava", "idefics3", "smolvlm")  # `model_type` of Hugging Face's config.json


def is_blind(spec: CaptionerSpec) -> bool:
    """Whether the model of a spec is a LLaMA that sees no pictures: without an adapter, and without a connector."""
    if spec.llama_dir is None or spec.adapter is not None:
        return False
    return not has_connector(Path(spec.llama_dir, spec.llama_type or ""))


def has_connector(folder: Path) -> bool:
    """Whether a folder holds a model that sees pictures as tokens."""
    from llama_adapter.runtime.tensor_files.arrays import read_json  # imports numpy

    try:
        return read_json(folder / "config.json").get("model_type") in KINDS
    except CheckpointError:
        return False
