"""A LLaMA inside a larger Hugging Face model, such as LLaVA: its configuration and its tensors."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError

# transformers omits entries of `text_config` that equal the defaults of its LlamaConfig.
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
}
_OF_THE_WHOLE = ("quantization_config", "tie_word_embeddings")  # of the whole model, but valid for the LLaMA
_NAMES = re.compile(r"(?:model\.language_model|language_model\.model)\.(.+)|(?:language_model\.)?(lm_head\.weight)")


def part_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the LLaMA inside a model; None if `config` does not describe such a model."""
    part = config.get("text_config")
    if config.get("model_type") == "llama" or not isinstance(part, dict) or part.get("model_type") != "llama":
        return None
    return {**_DEFAULTS, **part, **{name: config[name] for name in _OF_THE_WHOLE if config.get(name)}}


def part_tensors(tensors: Mapping[str, Tensor], *, file: object) -> dict[str, Tensor]:
    """The tensors of the LLaMA, renamed as in a plain LLaMA; tensors of other parts are left out.

    Raises CheckpointError if two tensors get the same name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (match := _NAMES.fullmatch(name)) is None:
            continue
        own = match[2] or f"model.{match[1]}"
        if own in found:
            raise CheckpointError(
                f"`{file}` has the tensor `{own}` of a LLaMA twice, under two prefixes with `language_model`",
                hint="the folder mixes files of two versions of transformers; save the model again",
            )
        found[own] = tensor
    return found
