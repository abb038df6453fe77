"""What a model needs to see pictures, and the memory of those that are tokens of its prompts.

Imports no torch: commands ask before they load a model.
"""

from typing import TYPE_CHECKING

from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.runtime.errors import UsageError

if TYPE_CHECKING:  # `--help` needs no numpy
    from llama_adapter.llm.config import DecoderConfig
    from llama_adapter.llm.picture_format import PictureFormat
    from llama_adapter.vision.config import VisionConfig


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


def require_sight(sources: CaptionerSpec | EncoderSources) -> None:
    """Raise UsageError for a LLaMA without adapter and connector, and CheckpointError if there is no such folder."""
    if _is_blind(sources):
        raise UsageError("--llama-dir needs --adapter beside it: a file such as BIAS-7B.pth")


def refuse_encoder(spec: CaptionerSpec) -> None:
    """Raise UsageError for an encoder beside such a LLaMA, and CheckpointError if there is no such folder."""
    if spec.encoder is not None and _is_blind(spec):
        raise UsageError("--encoder goes with --adapter, which is missing")


def _is_blind(sources: CaptionerSpec | EncoderSources) -> bool:
    if sources.llama_dir is None or sources.adapter is not None:
        return False
    from llama_adapter.app.models.llama_folder import find_llama  # imports numpy

    return not find_llama(sources.llama_dir, llama_type=sources.llama_type).sees_tokens
