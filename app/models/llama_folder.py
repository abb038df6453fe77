"""Finds a LLaMA folder and its tokenizer, before weights are read. Imports no torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llama_adapter.app.models.models_by_name import LlamaForm, form_of
from llama_adapter.llm.pieces.folder import JSON_MAKER, find_tokenizer, read_settings
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.weights.peft_config import lora_hint
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.gguf_files import only_gguf
from llama_adapter.runtime.tensor_files.gguf_names import is_gguf
from llama_adapter.runtime.text import shown_excerpt

_KINDS: Final = ("llava", "idefics3", "smolvlm")  # `model_type` of models that see pictures as tokens
# Of others that have no `vision_config`; a tower or a decoder alone sees no pictures.
_OTHERS: Final = re.compile("(?!.*_(vision_model|text)$).*(vision|moondream|phi3_v|phi4mm|molmo|ovis)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaFolder:
    """The paths of a LLaMA folder and its tokenizer, before they are read. A GGUF file is its own folder."""

    folder: Path
    form: LlamaForm
    tokenizer: Path | None  # None if neither the folder nor the one above has it; a GGUF file has its own inside

    @property
    def is_foreign(self) -> bool:
        """Whether transformers runs its model, unless an adapter extends it. Raises CheckpointError."""
        from llama_adapter.llm.weights.families import FOREIGN  # imports torch

        return self.form == "huggingface" and read_json(self.folder / "config.json").get("model_type") in FOREIGN

    @property
    def sees_tokens(self) -> bool:
        """Whether its model, without an adapter, sees pictures as tokens of its prompts.

        Raises CheckpointError for a model with a tower that is of another kind, or in another form.
        """
        if self.form != "huggingface":
            return False
        config = read_json(self.folder / "config.json")
        kind, is_original = config.get("model_type"), "mm_vision_tower" in config  # of LLaVA's own programs
        if not is_original and kind in _KINDS:
            return True
        if not is_original and "vision_config" not in config and not _OTHERS.match(str(kind)):
            return False
        what = "in the form of LLaVA's own programs" if is_original else f"of type {shown_excerpt(repr(kind))}"
        raise CheckpointError(
            f"`{self.folder}` holds a model {what}, whose pictures are not read here",
            hint="LLaVA-1.5, Idefics3 and SmolVLM in Hugging Face's form are read, such as llava-hf/llava-1.5-7b-hf",
        )

    def require_tokenizer(self) -> Path:
        """The tokenizer's file. Raises CheckpointError if there is none."""
        if self.tokenizer is not None:
            return self.tokenizer
        raise CheckpointError(
            f"There is no tokenizer.model or tokenizer.json in `{self.folder}` or in the folder above it",
            hint=f"copy the one that came with the LLaMA weights there; {JSON_MAKER}",
        )

    def open_tokenizer(self) -> Tokenizer:
        """Read the tokenizer. Raises CheckpointError if there is none, or if it cannot be read."""
        file = self.require_tokenizer()
        return Tokenizer.load(file, read_settings(file.parent, self.folder))


def find_llama(llama_dir: str | os.PathLike[str], *, llama_type: str | None = None) -> LlamaFolder:
    """Find the LLaMA folder and its tokenizer: `llama_dir` itself, its sub-folder `llama_type`, or its only model
    folder. A GGUF file, or the only one of a folder, stands for a folder.

    Raises CheckpointError if there is no such folder or file.
    """
    root = Path(llama_dir)
    if is_gguf(root) and not root.is_dir():
        if llama_type:
            raise CheckpointError(
                f"`{root}` is a file, so it has no sub-folder `{llama_type}`", hint="leave out --llama-type"
            )
        return LlamaFolder(folder=root, form="gguf", tokenizer=root)
    if not root.is_dir():
        problem = "is a file, and no .gguf file" if root.exists() else "does not exist"
        raise CheckpointError(
            f"The LLaMA folder `{root}` {problem}",
            hint="pass the folder with the weights, or a .gguf file, as --llama-dir",
        )
    models = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and form_of(entry))
    if llama_type:
        folder = root / llama_type
        if not folder.is_dir():
            hint = f"as --llama-type there {_enumerate(models)}" if models else "see --llama-dir and --llama-type"
            if form_of(root) is not None:
                hint = "that folder is a model itself: leave out --llama-type"
            raise CheckpointError(f"`{root}` has no sub-folder `{llama_type}`", hint=hint)
    elif form_of(root) is None and len(models) == 1:
        folder = root / models[0]
    else:
        folder = root
    form = form_of(folder)
    if form is None:
        hint = (
            "wanted: params.json with consolidated.00.pth (Meta), config.json with safetensors (Hugging Face), a "
            ".ckpt with its YAML (MindFormers), a .gguf file, or a bundle"
        )
        if models and not llama_type:
            hint = f"name one of its models as --llama-type; there {_enumerate(models)}"
        elif any(folder.glob("consolidated.*.pth")):
            hint = "it has the weights, but their params.json is missing; copy it too"
        elif (snapshots := folder / "snapshots").is_dir():
            hint = f"it is a repository in the cache of the Hugging Face Hub: name the folder in `{snapshots}`"
        raise CheckpointError(f"`{folder}` is no LLaMA folder", hint=lora_hint(folder) or hint)
    if form == "gguf":
        file = only_gguf(folder)
        return LlamaFolder(folder=file, form=form, tokenizer=file)
    beside = folder if folder == root else root
    tokenizer = next(filter(None, map(find_tokenizer, (folder, beside, folder.parent))), None)
    return LlamaFolder(folder=folder, form=form, tokenizer=tokenizer)


def base_name(folder: Path) -> str:
    """A LLaMA's name for display: that of its folder or file, and of a commit in the Hub's cache the repository's."""
    place = folder.resolve()
    if place.parent.name == "blobs":  # of the Hub's cache, where files have their digests as names
        place = folder.parent.resolve() / folder.name
    repository = place.parent.parent.name if place.parent.name == "snapshots" else ""
    return repository.rpartition("--")[2] or place.name


def tokenizer_of(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a bundle, a LLaMA folder, or beside a LLaMA folder. Raises CheckpointError if there is none."""
    place = Path(folder)
    file = find_tokenizer(place)
    return find_llama(place).open_tokenizer() if file is None else Tokenizer.load(file, read_settings(place))


def _enumerate(names: list[str]) -> str:
    return ("is " if len(names) == 1 else "are ") + ", ".join(f"`{name}`" for name in names[:12])
