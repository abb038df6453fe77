"""Finds the folder of an exported decoder from the names that MindSpore Lite uses for MindIR graphs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_adapter.app.models.models_by_name import find_model
from llama_adapter.llm.exported.card import CARD_FILE, read_card
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.ge_config import FILE as GE_CONFIG
from llama_adapter.runtime.settings.yaml_file import read_yaml

PATHS = ("prefill_model_path", "increment_model_path", "ge_config_path")
EXPORT = "`llama-adapter export decoder --format mindir --out FOLDER` writes such a folder"


def graphs_of(model: Any, *, is_required: bool = False) -> dict[str, Any] | None:
    """The fields of an `InferConfig` for a model of MindIR graphs; None for another model.

    `model` is a folder or its name, a settings file, a pair of graphs, or settings; None if the fields are given apart.
    With `is_required`, all settings are fields, since the paths may be given apart, and other models are errors. Raises
    UsageError for a folder of graphs of another form, and as `find_model`.
    """
    match model:
        case None:
            return {}
        case Mapping() if is_required or str(model.get("prefill_model_path", "")).endswith(".mindir"):
            return {name: value for name, value in model.items() if value != ""}
        case [prefill, increment] if any(str(path).endswith(".mindir") for path in model):
            return dict(zip(PATHS, map(os.fspath, (prefill, increment)), strict=False))
        case str() | os.PathLike():
            place = find_model(os.fspath(model))
            if place.suffix in (".yaml", ".yml"):
                if (found := _of_yaml(place)) is not None:
                    return found
            elif (place / CARD_FILE).is_file() or any(place.glob("*.mindir")):
                return _of_folder(place)
    if is_required:
        wanted = "their folder, the pair of them, or a YAML file with a section `infer`"
        raise UsageError(f"`{model!s:.200}` names no MindIR graphs: wanted {wanted}", hint=EXPORT)
    return None


def mindir_folder(prefill: str, increment: str) -> Path:
    """The folder of two graphs. Raises UsageError unless its card names them, and GraphError for a damaged card."""
    if not prefill or not increment:
        raise UsageError("MindIR graphs are to be run, and `model` does not name a pair of them", hint=EXPORT)
    paths = [Path(path).expanduser() for path in (prefill, increment)]
    folder = paths[0].parent
    if missing := [path for path in paths if not path.is_file()]:
        raise UsageError(f"The graph `{missing[0]}` does not exist", hint=EXPORT)
    for path, (kind, own) in zip(paths, _graphs_of(folder).items(), strict=True):
        if path.resolve() != own.resolve():
            raise UsageError(
                f"`{path}` is not the {kind} graph of `{folder}`, which is {own.name}",
                hint="the first graph of a pair makes the first token, and the second one the others",
            )
    return folder


def _graphs_of(folder: Path) -> dict[str, Path]:
    """The two graphs that a folder's card names. Raises UsageError without a card, GraphError for a damaged one."""
    if not (folder / CARD_FILE).is_file():
        why = "graphs of other programs have other inputs, and are not run here"
        raise UsageError(f"`{folder}` has no {CARD_FILE}: {why}", hint=EXPORT)
    card = read_card(folder)
    if card.format != "mindir":
        raise UsageError(f"The decoder in `{folder}` was exported as {card.format}, not as mindir", hint=EXPORT)
    own = card.settings or {}
    return {kind: folder / str(own.get(kind)) for kind in ("prefill", "increment")}


def _of_yaml(path: Path) -> dict[str, Any] | None:
    """The section `infer` of a settings file, if it has one. Its paths may be relative to the file."""
    section = read_yaml(str(path)).get("infer")
    if not isinstance(section, Mapping):
        return None
    found = {name: value for name, value in section.items() if value not in (None, "")}
    return found | {name: str(path.parent / found[name]) for name in PATHS if name in found}


def _of_folder(folder: Path) -> dict[str, Any]:
    """The fields for a folder: of at most one settings file, the graphs of its card, and a `config.ini`."""
    settings = sorted(folder.glob("*.y*ml"))
    if len(settings) > 1:
        names = ", ".join(path.name for path in settings)
        raise UsageError(f"`{folder}` has {len(settings)} files of settings ({names})", hint="keep one of them")
    found = (_of_yaml(settings[0]) if settings else None) or {}
    found |= dict(zip(PATHS, map(str, _graphs_of(folder).values()), strict=False))
    if (folder / GE_CONFIG).is_file():
        found["ge_config_path"] = str(folder / GE_CONFIG)
    return found
