"""The module `mindformers` for programs of MindFormers and MindSpore Lite: their calls, made with `pipeline`."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from llama_adapter.app.compat import mindformers_settings
from llama_adapter.app.compat.infer import InferTask as OwnInferTask
from llama_adapter.app.compat.infer_config import InferConfig
from llama_adapter.app.compat.pipeline import Pipeline
from llama_adapter.app.compat.pipeline import pipeline as open_pipeline
from llama_adapter.app.compat.streamer import TextIteratorStreamer, TextStreamer
from llama_adapter.app.models.checkpoints import find_llama
from llama_adapter.app.models.models_by_name import find_model, model_settings
from llama_adapter.app.terminal.stderr_lines import say
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.errors import UsageError

__all__ = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "BloomTokenizer",
    "InferConfig",
    "InferTask",
    "LlamaForCausalLM",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "TextIteratorStreamer",
    "TextStreamer",
    "build_context",
    "pipeline",
]

StrPath = str | os.PathLike[str]
_MODEL: Final = {"model", "llama_dir"}  # flags that replace the program's model

# In MindFormers, these are modules of its package.
auto_class = models = auto = llama = llama_tokenizer = bloom = bloom_tokenizer = sys.modules[__name__]
core = context = generation = streamers = infer = infer_config = infer_task = inference = sys.modules[__name__]

overrides: dict[str, Any] = {}  # fields of `CaptionerSpec` set by flags of `run-reference`
_context: dict[str, Any] = {}  # defaults of pipelines, from `build_context`


def begin(flags: Mapping[str, Any]) -> None:
    """Forget an earlier program, and take the flags of a new one."""
    overrides.clear()
    _context.clear()
    overrides.update(flags)


def build_context(config: Mapping[str, Any]) -> None:
    """Choose mode and device of the pipelines that are made later: `context.mode`, `device_target` and `device_id`.

    A note names each key without effect. Raises UsageError for a value that is not supported.
    """
    found = _imported({name: value for name, value in config.items() if value}, source="build_context")
    _context.clear()
    _context.update(found.get("computation", {}))


class AutoModel(dict[str, Any]):
    """Settings of a model, which `pipeline` loads."""

    @classmethod
    def from_pretrained(cls, name: StrPath, *, checkpoint_name_or_path: StrPath | None = None, **config: Any) -> Self:
        """The model of a name or path, or of a checkpoint: a model's folder, or the `.ckpt` in it.

        `config` has keys of `model_config`. A note names each key without effect. Raises UsageError if there is no such
        model, and for values that are not supported.
        """
        if not _MODEL & overrides.keys():
            place = Path(name if checkpoint_name_or_path is None else checkpoint_name_or_path)
            if place.suffix == ".ckpt" and not place.expanduser().is_file():
                raise UsageError(f"The checkpoint `{place}` does not exist", hint="name a .ckpt, or a model's folder")
            place = find_model(os.fspath(place.parent if place.suffix == ".ckpt" else place))
            model_settings(place)
            config["checkpoint_name_or_path"] = os.fspath(place)
        found = _imported({"model": {"model_config": config}}, source="AutoModel.from_pretrained")
        return cls({name: table for name, table in found.items() if name not in ("command", "prompt")})


class AutoTokenizer:
    """The tokenizer of a model, read at its first use. If there is no such model, it becomes that of the pipeline."""

    def __init__(self, name: StrPath) -> None:
        self._name = os.fspath(name)
        self.own: Tokenizer | None = None

    @classmethod
    def from_pretrained(cls, name: StrPath, **_settings: Any) -> Self:
        """The tokenizer of a name, of a model's folder, or of a `tokenizer.model`. Settings have no effect."""
        return cls(name)

    def load(self) -> Tokenizer:
        """The tokenizer itself. Raises UsageError without a model of the name, and CheckpointError for its file."""
        if self.own is None:
            place = find_model(self._name)
            file = place if place.is_file() else place / "tokenizer.model"
            self.own = Tokenizer.load(file if file.is_file() else find_llama(place).require_tokenizer())
        return self.own

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with the begin token if `add_special_tokens`."""
        return self.load().encode(text, bos=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Special tokens have no text."""
        return self.load().decode(token_ids)

    def __call__(self, text: str, add_special_tokens: bool = True, **_settings: Any) -> dict[str, list[int]]:
        """`input_ids` and `attention_mask` of a text."""
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def pipeline(
    task: str,
    model: Any = None,
    tokenizer: Any = None,
    image_processor: Callable[[Any], Any] | None = None,
    audio_processor: None = None,
    backend: str = "torch",
    **settings: Any,
) -> Pipeline:
    """As `llama_adapter.pipeline`, with the defaults of `build_context`. Flags of `run-reference` take precedence."""
    is_replaced = bool(_MODEL & overrides.keys())
    given = None if isinstance(tokenizer, AutoTokenizer) and _is_models(tokenizer, is_replaced) else tokenizer
    values = {**_context, **settings, **overrides}
    model = values.pop("model", None) if is_replaced else model
    made = open_pipeline(task, model, given, image_processor, audio_processor, backend, **values)
    if given is not tokenizer:
        tokenizer.own = made.tokenizer
    return made


class InferTask(OwnInferTask):
    """As `llama_adapter.InferTask`, with the pipelines of this module."""

    open_pipeline = staticmethod(pipeline)


def _is_models(tokenizer: AutoTokenizer, is_replaced: bool) -> bool:
    """Whether a tokenizer is to be that of the pipeline's model, because a flag replaces it or it is not found."""
    try:
        if not is_replaced:
            tokenizer.load()
    except UsageError as error:
        say(f"note: the model's own tokenizer is used. {error.message}")
        return True
    return is_replaced


def _imported(data: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Settings of this package, by section, for settings of MindFormers. Says notes. Raises UsageError."""
    imported = mindformers_settings.import_settings(data)
    for entry in imported.refused:
        raise UsageError(f"{source}: `{entry.key}` is refused: {entry.text}")
    for entry in imported.report:
        if entry.outcome == "ignored":
            say(f"note: {source}: {entry}")
    return imported.settings


AutoModelForCausalLM = LlamaForCausalLM = AutoModel
BloomTokenizer = LlamaTokenizer = LlamaTokenizerFast = AutoTokenizer
