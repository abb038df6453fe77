"""Which models see pictures as tokens of their prompts: those with a tower, a connector and a decoder in one folder.

Imports no torch: commands ask before they load a model.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.text import shown_excerpt

if TYPE_CHECKING:  # `--help` needs no numpy
    from llama_adapter.llm.config import DecoderConfig
    from llama_adapter.llm.picture_format import PictureFormat
    from llama_adapter.vision.config import VisionConfig

KINDS: Final = ("llava", "idefics3", "smolvlm")  # `model_type` of Hugging Face's config.json
_OTHERS: Final = re.compile("vision|moondream|phi3_v|phi4mm|molmo|ovis")  # of others that have no `vision_config`


def encoding_bytes(
    pictures: "PictureFormat | None", vision: "VisionConfig | None", decoder: "DecoderConfig", *, itemsize: int
) -> int:
    """Memory of each row while pictures are encoded as tokens of prompts; 0 for other models.

    The encoder computes as many squares at once as there are rows, and the tokens of all squares of a row are kept.
    `itemsize` is that of activations, in bytes.
    """
    if pictures is None or vision is None:
        return 0
    kept = pictures.most_squares * pictures.tokens_each * decoder.dim
    return int((vision.num_activations + kept) * itemsize)


def is_blind(spec: CaptionerSpec) -> bool:
    """Whether the model of a spec is a LLaMA that sees no pictures: without an adapter, and without a connector."""
    if spec.llama_dir is None or spec.adapter is not None:
        return False
    return not has_connector(Path(spec.llama_dir, spec.llama_type or ""))


def has_connector(folder: Path) -> bool:
    """Whether a folder holds a model that sees pictures as tokens.

    Raises CheckpointError for a model with a tower that is of another kind, or in another form.
    """
    from llama_adapter.runtime.tensor_files.arrays import read_json  # imports numpy

    try:
        config = read_json(folder / "config.json")
    except CheckpointError:
        return False
    kind, is_original = config.get("model_type"), "mm_vision_tower" in config  # of LLaVA's own programs
    if kind in KINDS and not is_original:
        return True
    if is_original or "vision_config" in config or _OTHERS.search(str(kind)):
        what = "in the form of LLaVA's own programs" if is_original else f"of type {shown_excerpt(repr(kind))}"
        raise CheckpointError(
            f"`{folder}` holds a model {what}, whose pictures are not read here",
            hint="LLaVA-1.5, Idefics3 and SmolVLM in Hugging Face's form are read, such as llava-hf/llava-1.5-7b-hf",
        )
    return False
