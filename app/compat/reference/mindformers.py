"""The module `mindformers` for programs of MindFormers and MindSpore Lite: their calls, made with `pipeline`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from llama_adapter.app.compat.importers import import_mindformers
from llama_adapter.app.compat.infer_config import InferConfig
from llama_adapter.app.compat.pipeline import InferTask as OwnInferTask
from llama_adapter.app.compat.pipeline import Pipeline
from llama_adapter.app.compat.pipeline import pipeline as open_pipeline
from llama_adapter.app.compat.streamer import TextIteratorStreamer, TextStreamer
from llama_adapter.app.models.llama_folder import tokenizer_of
from llama_adapter.app.models.models_by_name import find_model, model_settings
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.terminal.stderr_lines import say

__all__ = ["AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "BloomTokenizer", "InferConfig", "InferTask"]
__all__ += ["LlamaForCausalLM", "LlamaTokenizer", "TextIteratorStreamer", "TextStreamer", "build_context", "pipeline"]

_MODEL: Final = {"model", "llama_dir"}  # flags that replace the program's model

# In MindFormers, these are modules of its package.
models = llama = llama_tokenizer = bloom = bloom_tokenizer = generation = sys.modules[__name__]
infer = infer_config = infer_task = inference = core = context = sys.modules[__name__]

overrides: dict[str, Any] = {}  # fields of `CaptionerSpec` set by flags of `run-reference`
_context: dict[str, Any] = {}  # defaults of pipelines, from `build_context`


def begin(flags: Mapping[str, Any]) -> None:
    """Forget an earlier program, and take the flags of a new one."""
    _context.clear()
    overrides.clear()
    overrides.update(flags)


def build_context(config: Mapping[str, Any]) -> None:
    """Choose mode and device of later pipelines: `context.mode`, `device_target` and `device_id`.

    A note names each key without effect. Raises UsageError for a value that is not supported.
    """
    found = _imported({name: value for name, value in config.items() if value}, source="build_context")
    _context.clear()
    _context.update(found.get("computation", {}))


class AutoModel(dict[str, Any]):
    """Settings of a model, which `pipeline` loads."""

    @classmethod
    def from_pretrained(cls, name: str, *, checkpoint_name_or_path: str | None = None, **config: Any) -> Self:
        """The model of a name or path, or of a checkpoint: a model's folder, or the `.ckpt` in it.

        `config` has keys of `model_config`. A note names each key without effect. Raises UsageError if there is no such
        model, and for values that are not supported.
        """
        if not _MODEL & overrides.keys():
            place = Path(checkpoint_name_or_path or name).expanduser()
            is_file_of_folder = place.suffix == ".ckpt" and place.is_file()
            place = find_model(os.fspath(place.parent if is_file_of_folder else place))
            model_settings(place)
            config["checkpoint_name_or_path"] = os.fspath(place)
        found = _imported({"model": {"model_config": config}}, source="AutoModel.from_pretrained")
        return cls({name: table for name, table in found.items() if name not in ("command", "prompt")})


class AutoTokenizer:
    """The tokenizer of a model by name."""

    @classmethod
    def from_pretrained(cls, name: str, **_settings: Any) -> Tokenizer | None:
        """The tokenizer of a name, a model's folder, or a `tokenizer.model`. Settings have no effect.

        None means that of the pipeline's model: if a flag names the model, and with a note if there is no such name.
        """
        if _MODEL & overrides.keys():
            return None
        try:
            place = find_model(name)
        except UsageError as error:
            say(f"note: the pipeline's model brings its own tokenizer. {error.message}")
            return None
        return Tokenizer.load(place) if place.is_file() else tokenizer_of(place)


def pipeline(task: str, model: Any = None, *arguments: Any, **settings: Any) -> Pipeline:
    """As `llama_adapter.pipeline`, with the defaults of `build_context`. Flags of `run-reference` take precedence."""
    settings = {**_context, **settings, **overrides}
    if _MODEL & overrides.keys():
        model = settings.pop("model", None)
    return open_pipeline(task, model, *arguments, **settings)


class InferTask(OwnInferTask):
    """As `llama_adapter.InferTask`, with the pipelines of this module."""

    open_pipeline = staticmethod(pipeline)


def _imported(data: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Settings of this package, by section, for settings of MindFormers. Says notes. Raises UsageError."""
    imported = import_mindformers(data).check(source, is_file=False)
    for entry in imported.report:
        if entry.outcome == "ignored":
            say(f"note: {source}: {entry}")
    return imported.settings


BloomTokenizer = LlamaTokenizer = AutoTokenizer
AutoModelForCausalLM = LlamaForCausalLM = AutoModel
