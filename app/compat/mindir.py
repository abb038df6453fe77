"""Finds the folder of an exported decoder from the names that MindSpore Lite uses for MindIR graphs."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_adapter.app.models.models_by_name import find_model
from llama_adapter.llm.exported.card import CARD_FILE, read_card
from llama_adapter.runtime.device_names import our_device
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.ge_config import FILE as GE_CONFIG
from llama_adapter.runtime.settings.yaml_file import read_yaml

_PATHS = ("prefill_model_path", "increment_model_path", "ge_config_path")
_ENDINGS = {"prefill_model_path": "prefill_graph.mindir", "increment_model_path": "inc_graph.mindir"}
_DEFAULT_LENGTH = 1024  # default of `infer_seq_length` in an InferConfig
_EXPORT = "`llama-adapter export decoder --format mindir --out FOLDER` writes such a folder"


def mindir_settings(model: Any) -> dict[str, Any]:
    """The fields of an `InferConfig` for graphs. `model`: their folder or its name, a pair of files, settings, or None.

    Raises UsageError if the folder has another form.
    """
    if model is None:
        return {}
    if isinstance(model, Mapping):
        return {name: value for name, value in model.items() if value != ""}
    if isinstance(model, tuple | list) and len(model) == 2:
        return dict(zip(_PATHS, map(os.fspath, model), strict=False))
    if not isinstance(model, str | os.PathLike):
        raise UsageError(f"model must be a name, a folder, a pair of graphs or an InferConfig, got {model!r:.80}")
    place = find_model(os.fspath(model))
    if place.suffix in (".yaml", ".yml"):
        return _of_yaml(place)
    if not place.is_dir():
        raise UsageError(f"`{place}` is no folder of MindIR graphs", hint=_EXPORT)
    return _of_folder(place)


def names_graphs(model: Any) -> bool:
    """Whether `model` has a form of `mindir_settings`, not that of a checkpoint. Raises UsageError as `find_model`."""
    if isinstance(model, Mapping):
        return str(model.get("prefill_model_path", "")).endswith(".mindir")
    if isinstance(model, tuple | list):
        return any(str(path).endswith(".mindir") for path in model)
    if not isinstance(model, str | os.PathLike):
        return model is None
    place = find_model(os.fspath(model))
    if place.suffix in (".yaml", ".yml"):
        return "infer" in read_yaml(str(place))
    return (place / CARD_FILE).is_file() or any(place.glob("*.mindir"))


def captioner_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `Captioner.load` for the fields of an `InferConfig` with graphs. Other fields are kept.

    Warns if the graphs take fewer tokens than `infer_seq_length`. Raises UsageError for values that are not supported,
    and GraphError for a damaged card.
    """
    found = dict(config)
    prefill, increment = (found.pop(name, "") for name in _ENDINGS)
    if not prefill or not increment:
        raise UsageError("MindIR graphs are to be run, and `model` does not name a pair of them", hint=_EXPORT)
    if (kind := found.pop("model_type", "mindir")) != "mindir":
        raise UsageError(f"model_type must be mindir, got {kind}", hint=_EXPORT)
    if found.pop("rank_id", 0) != 0:
        raise UsageError("rank_id must be 0: a model runs on one device")
    found.pop("model_name", None)
    folder = mindir_folder(prefill, increment)
    found["decoder"] = str(folder)
    if path := found.pop("ge_config_path", ""):
        found["ge_config"] = os.fspath(path)
    target, index = str(found.pop("target", "auto")), found.pop("device_id", 0)
    if target != "auto" or index:
        device = our_device("ascend" if target == "auto" else target, index=index)
        if device is None:
            raise UsageError(f"No target named `{target}`", hint="Ascend, CPU or auto")
        found.setdefault("device", device)
    most, length = read_card(folder).config.context, found.pop("infer_seq_length", None)
    if length is not None:
        if length > most and length != _DEFAULT_LENGTH:
            warnings.warn(f"infer_seq_length {length}: the graphs take {most} tokens", stacklevel=4)
        found.setdefault("context", min(length, most))
    return found


def mindir_folder(prefill: str, increment: str) -> Path:
    """The folder of two graphs. Raises UsageError unless its card names them, and GraphError for a damaged card."""
    paths = [Path(path).expanduser() for path in (prefill, increment)]
    folder = paths[0].parent
    if missing := [path for path in paths if not path.is_file()]:
        raise UsageError(f"The graph `{missing[0]}` does not exist", hint=_EXPORT)
    if not (folder / CARD_FILE).is_file():
        raise UsageError(
            f"`{folder}` has no {CARD_FILE}: graphs of other programs have other inputs, and are not run here",
            hint=_EXPORT,
        )
    own = read_card(folder).settings or {}
    for path, kind in zip(paths, ("prefill", "increment"), strict=True):
        if path.resolve() != (folder / str(own.get(kind))).resolve():
            raise UsageError(
                f"`{path}` is not the {kind} graph of `{folder}`, which is {own.get(kind)}",
                hint="the first graph of a pair makes the first token, and the second one the others",
            )
    return folder


def _of_yaml(path: Path) -> dict[str, Any]:
    """The section `infer` of a settings file. Its paths may be relative to the file."""
    section = read_yaml(str(path)).get("infer")
    if not isinstance(section, Mapping):
        raise UsageError(f"`{path}` has no section `infer`", hint=_EXPORT)
    found = {name: value for name, value in section.items() if value not in (None, "")}
    return found | {name: str(path.parent / found[name]) for name in _PATHS if name in found}


def _of_folder(folder: Path) -> dict[str, Any]:
    """The fields for a folder: of at most one settings file, two graphs with the usual endings, and a `config.ini`."""
    settings = sorted(folder.glob("*.y*ml"))
    if len(settings) > 1:
        names = ", ".join(path.name for path in settings)
        raise UsageError(f"`{folder}` has {len(settings)} files of settings ({names})", hint="keep one of them")
    found = _of_yaml(settings[0]) if settings else {}
    graphs = sorted(folder.glob("*.mindir"))
    if len(graphs) > 2:
        names = ", ".join(path.name for path in graphs)
        raise UsageError(f"`{folder}` has {len(graphs)} MindIR graphs ({names})", hint="keep the two of one model")
    for name, ending in _ENDINGS.items():
        own = [path for path in graphs if path.name.endswith(ending)]
        if len(own) != 1:
            raise UsageError(f"`{folder}` has no graph whose name ends in {ending}", hint=_EXPORT)
        found[name] = str(own[0])
    if (folder / GE_CONFIG).is_file():
        found["ge_config_path"] = str(folder / GE_CONFIG)
    return found
