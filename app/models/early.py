"""Looks at the files of a model before torch is imported, which takes longer than a refusal."""

from pathlib import Path

from llama_adapter.app.models.bundle_manifest import MANIFEST, Manifest, read_manifest
from llama_adapter.app.models.exported import check_encoder_exists
from llama_adapter.app.models.llama_folder import LlamaFolder, find_llama
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.parallel.launch import launched
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.runtime.tensor_files.arrays import require_file
from llama_adapter.vision.tower_files import clip_files


def require_model(sources: CaptionerSpec | EncoderSources) -> None:
    """Raise CheckpointError, UsageError or GraphError if a part of a model is missing. No weights are read.

    Ranks of `torchrun` agree on an error after they have met, which needs torch, so they are not looked at here.
    """
    if isinstance(sources, CaptionerSpec):
        if sources.tensor_parallel > 1 and launched() is not None:
            return
        check_encoder_exists(sources)
    if isinstance(sources, CaptionerSpec) or sources.adapter is None:  # the encoder of an adapter needs no LLaMA
        found = _find(sources)
        if isinstance(found, LlamaFolder):
            found.require_tokenizer()
    if sources.adapter is not None:
        require_file(Path(sources.adapter))
    if sources.clip is not None and not Path(sources.clip, MANIFEST).is_file():
        clip_files(sources.clip)


def sees_tokens(sources: CaptionerSpec | EncoderSources) -> bool:
    """Whether the model sees pictures as tokens of its prompts. Raises CheckpointError if it is missing."""
    return sources.adapter is None and _find(sources).sees_tokens


def _find(sources: CaptionerSpec | EncoderSources) -> LlamaFolder | Manifest:
    if sources.llama_dir is not None:
        return find_llama(sources.llama_dir, llama_type=sources.llama_type)
    return again_if_replaced(read_manifest)(bundle_folder(sources.model))
