"""Looks at the files of a model before torch is imported, which takes longer than a refusal."""

from pathlib import Path
from typing import TYPE_CHECKING

from llama_adapter.app.models.bundle_manifest import Manifest, read_manifest
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.parallel.launch import launched
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources, tokens_error
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.tensor_files.arrays import require_file
from llama_adapter.runtime.text import shown_name

if TYPE_CHECKING:
    from llama_adapter.app.models.llama_folder import LlamaFolder


def require_model(sources: CaptionerSpec | EncoderSources) -> None:
    """Raise CheckpointError, UsageError or GraphError if a part of a model is missing. No weights are read.

    Ranks of `torchrun` agree on an error after they have met, which needs torch, so they are not looked at here.
    """
    if isinstance(sources, CaptionerSpec):
        if sources.tensor_parallel > 1 and launched() is not None:
            return
        check_encoder_exists(sources)
    if isinstance(sources, CaptionerSpec) or sources.adapter is None:  # the encoder of an adapter needs no LLaMA
        _find(sources)
    for path in (sources.adapter, sources.clip):
        if path is not None and not Path(path).exists():  # it may be a folder
            require_file(Path(path))


def check_encoder_exists(spec: CaptionerSpec) -> None:
    """Raise GraphError for an encoder that does not exist. Called before a device is opened or gigabytes are read."""
    if spec.encoder is not None and not Path(spec.encoder).exists():
        maker = "encode" if spec.vision_kind == "prefixes" else f"export {spec.vision_kind}"
        raise GraphError(f"The encoder `{spec.encoder}` does not exist", hint=f"`llama-adapter {maker}` makes one")


def refuse_tokens(sources: CaptionerSpec | EncoderSources) -> None:
    """Raise UsageError, for prefix files, if the model sees pictures as tokens of its prompts."""
    if sources.adapter is None:
        found = _find(sources)
        if isinstance(found, Manifest):
            name, sees_tokens = found["name"], found.picture_format is not None
        else:
            from llama_adapter.app.models.llama_folder import base_name

            name, sees_tokens = shown_name(base_name(found.folder)), found.sees_tokens
        if sees_tokens:
            raise tokens_error(name)


def _find(sources: CaptionerSpec | EncoderSources) -> "LlamaFolder | Manifest":
    if sources.llama_dir is not None:
        from llama_adapter.app.models.llama_folder import find_llama  # bundles need no reader of LLaMA folders

        place = find_llama(sources.llama_dir, llama_type=sources.llama_type)
        place.require_tokenizer()
        return place
    return again_if_replaced(read_manifest)(bundle_folder(sources.model))
