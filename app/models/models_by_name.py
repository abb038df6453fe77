"""Finds the model that a name or path means, and its settings."""

import os
from pathlib import Path

from llama_adapter.app.models.resources import embedded_model
from llama_adapter.runtime.errors import UsageError

HOME = "LLAMA_ADAPTER_HOME"  # folders in which models are found by name, separated as in PATH

FOREIGN_WEIGHTS = (".mindir", ".ckpt", ".pdparams", ".pdmodel", ".pdiparams")  # of MindSpore and Paddle


def find_model(name: str) -> Path:
    """The file or folder of a model: a path, or a name on the search path.

    Raises UsageError if there is none, and for weights of MindSpore and Paddle.
    """
    place = Path(name).expanduser()
    if place.suffix in FOREIGN_WEIGHTS:
        raise UsageError(
            f"`{place}` is a file of MindSpore or Paddle, which cannot be read here",
            hint="name the folder of a .ckpt and its YAML, or the checkpoint that the file was made from: a folder of "
            "Hugging Face's or Meta's form, or a bundle",
        )
    if place.exists():
        return place
    folders = [folder for folder in os.environ.get(HOME, "").split(os.pathsep) if folder]
    for folder in folders:
        if (found := Path(folder).expanduser() / name).exists():
            return found
    searched = f"nor in {HOME} ({os.pathsep.join(folders)})" if folders else f"and {HOME} names no folders"
    raise UsageError(
        f"No model `{name}`: there is no such file or folder, {searched}",
        hint=f"name a bundle, a LLaMA folder, or a folder inside one of {HOME}",
    )


def bundle_folder(name: str | os.PathLike[str] | None) -> Path:
    """The folder of a bundle, from a path or a name on the search path; None means the embedded model.

    The folder need not exist.
    """
    if name is None:
        return embedded_model()
    try:
        return find_model(os.fspath(name))
    except UsageError:
        return Path(name)


def model_settings(place: Path) -> dict[str, str]:
    """The model settings of a folder: a bundle, or LLaMA as Meta or Hugging Face ship it.

    Raises UsageError for anything else.
    """
    if (place / "manifest.json").is_file():
        return {"model": str(place)}
    if any((place / name).is_file() for name in ("config.json", "params.json")) or any(place.glob("*.ckpt")):
        return {"llama_dir": str(place)}
    types = sorted(params.parent.name for params in place.glob("*/params.json"))
    if len(types) == 1:
        return {"llama_dir": str(place), "llama_type": types[0]}
    if types:
        raise UsageError(
            f"`{place}` holds several models: {', '.join(types)}", hint=f"name one of them: `{place / types[0]}`"
        )
    raise UsageError(
        f"`{place}` is no model: it has no manifest.json, config.json or params.json",
        hint="name a bundle that `llama-adapter convert` wrote, or a LLaMA folder of Meta's or Hugging Face's form",
    )
