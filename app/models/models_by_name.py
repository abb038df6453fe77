"""Finds the model that a name or path means, and its settings."""

import os
import shlex
from pathlib import Path
from typing import Any, Literal

from llama_adapter.app.models.resources import embedded_model
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.tensor_files.gguf_names import WEIGHT_FILES, is_gguf

LlamaForm = Literal["meta", "huggingface", "mindspore", "gguf", "bundle"]

HOME = "LLAMA_ADAPTER_HOME"  # folders in which models are found by name, separated as in PATH

FOREIGN_WEIGHTS = (".mindir", ".ckpt", ".pdparams", ".pdmodel", ".pdiparams")  # of MindSpore and Paddle


def foreign_weights(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Why a file of `FOREIGN_WEIGHTS` is no name of a model, and what to name in its place."""
    place = Path(path).expanduser()
    folder = shlex.quote(str(place.parent))
    match place.suffix:
        case ".ckpt" if not place.exists():
            return f"There is no file `{path}`", "name a .ckpt beside the YAML of its model, or its folder"
        case ".ckpt":
            hint = "name a folder that has one .ckpt, its YAML and tokenizer.model"
            return f"`{path}` is no model of MindFormers by itself", hint
        case ".mindir":
            hint = f"`--decoder {folder}` runs graphs that `llama-adapter export decoder --format mindir` wrote"
            return f"`{path}` is one graph of a model", hint
    return f"`{path}` is a file of Paddle, which is not read", "name the Hugging Face or Meta folder that it comes from"


def find_model(name: str) -> Path:
    """The file or folder of a model: a path, or a name on the search path. The folder of a `.ckpt` of MindFormers.

    Raises UsageError if there is none, and for weights of MindSpore and Paddle.
    """
    place = Path(name).expanduser()
    if place.suffix == ".ckpt" and place.is_file() and form_of(place.parent) in ("mindspore", "huggingface"):
        return place.parent
    if place.suffix in FOREIGN_WEIGHTS:
        message, hint = foreign_weights(place)
        raise UsageError(message, hint=hint)
    if place.exists():
        return place
    folders = [folder for folder in os.environ.get(HOME, "").split(os.pathsep) if folder]
    for folder in folders:
        if (found := Path(folder).expanduser() / name).exists():
            return found
    searched = f"nor in {HOME} ({os.pathsep.join(folders)})" if folders else f"and {HOME} names no folders"
    raise UsageError(
        f"No model `{name}`: there is no such file or folder, {searched}",
        hint=f"name a bundle, a LLaMA folder or .gguf file, or a folder inside one of {HOME}",
    )


def bundle_folder(name: str | os.PathLike[str] | None) -> Path:
    """The folder of a bundle, from a path or a name on the search path; None means the embedded model.

    The folder need not exist. Raises UsageError for weights of MindSpore and Paddle.
    """
    if name is None:
        return embedded_model()
    if (place := Path(name)).suffix in FOREIGN_WEIGHTS and not place.is_dir():
        message, hint = foreign_weights(name)
        raise UsageError(message, hint=hint)
    try:
        return find_model(os.fspath(name))
    except UsageError:
        return Path(name)


def form_of(folder: Path) -> LlamaForm | None:
    """The form of the model in a folder; None if it holds none itself."""
    if (folder / "manifest.json").is_file():
        return "bundle"
    has_meta, has_huggingface = (folder / "params.json").is_file(), (folder / "config.json").is_file()
    if has_meta and (not has_huggingface or any(folder.glob("consolidated.*.pth"))):
        return "meta"
    has_gguf = any(folder.glob("*.gguf"))  # many come with the config.json of the model that they were made from
    has_weights = any((folder / (name + end)).exists() for name in WEIGHT_FILES for end in ("", ".index.json"))
    if has_huggingface and (has_weights or not has_gguf):
        return "huggingface"
    return "mindspore" if any(folder.glob("*.ckpt")) else "gguf" if has_gguf else None


def llama_settings(place: Path) -> dict[str, Any] | None:
    """As `model_settings`, of LLaMA as Meta or Hugging Face ship it, or a GGUF file; None for anything else."""
    try:
        found = model_settings(place)
    except UsageError:
        return None
    return found if "llama_dir" in found else None


def model_settings(place: Path) -> dict[str, Any]:
    """The model settings of a folder or GGUF file: a bundle, or LLaMA as Meta or Hugging Face ship it.

    Raises UsageError for anything else.
    """
    form = form_of(place) or ("gguf" if is_gguf(place) else None)
    if form is not None:
        return {"model" if form == "bundle" else "llama_dir": str(place)}
    types = sorted(params.parent.name for params in place.glob("*/params.json"))
    if len(types) == 1:
        return {"llama_dir": str(place), "llama_type": types[0]}
    if types:
        raise UsageError(
            f"`{place}` holds several models: {', '.join(types)}", hint=f"name one of them: `{place / types[0]}`"
        )
    raise UsageError(
        f"`{place}` is no model: it has no manifest.json, config.json, params.json or .gguf file",
        hint="name a bundle that `llama-adapter convert` wrote, or a LLaMA folder of Meta's or Hugging Face's form",
    )
