"""MindSpore Lite: `InferConfig`, the names of MindIR graphs, and their conversion to settings of `pipeline`."""

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
_EXPORT = "`llama-adapter export decoder --format mindir --out FOLDER` writes such a folder"
_DEFAULT_LENGTH = 1024  # of `infer_seq_length`


class InferConfig(dict[str, Any]):
    """A dict with the fields of MindSpore Lite's `InferConfig`. The fields are also attributes."""

    def __init__(
        self,
        prefill_model_path: str = "",
        increment_model_path: str = "",
        model_type: str = "mindir",
        model_name: str = "common",
        infer_seq_length: int = _DEFAULT_LENGTH,
        target: str = "auto",
        device_id: int = 0,
        rank_id: int = 0,
        ge_config_path: str = "",
        **settings: Any,
    ) -> None:
        """
        Parameters:
            prefill_model_path: the graph for the first token, `<name>_prefill_graph.mindir`; or, without graphs, a
                bundle, a LLaMA folder, or a name. Empty: `model_name`.
            increment_model_path: the graph for the other tokens, `<name>_inc_graph.mindir`.
            model_type: type of the graphs, `"mindir"`.
            model_name: a name on the search path, if `prefill_model_path` is empty; `"common"` is the embedded model.
            infer_seq_length: most tokens of prompt and answer together.
            target: `"Ascend"`, `"GPU"`, `"CPU"`, or `"auto"`, the first of these that is available.
            device_id: index of the accelerator.
            rank_id: must be 0; `tensor_parallel` starts the other ranks of a split model.
            ge_config_path: options of the graphs on Ascend, `config.ini`.
            settings: those of `pipeline`, such as `adapter`, `dtype` and `mode`.
        """
        given = dict(locals())
        names = [name for name in given if name not in ("self", "settings", "__class__")]
        super().__init__({name: given[name] for name in names} | settings)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def lite_settings(config: Mapping[str, Any], *, runs_graphs: bool = False) -> dict[str, Any]:
    """The settings of `pipeline` for the fields of an `InferConfig`. Other fields are kept.

    With `runs_graphs`, these are a `decoder` of MindIR graphs and its `ge_config`; otherwise they include a `model`.
    Warns about fields without effect, and if the graphs take fewer tokens than `infer_seq_length`. Raises UsageError
    for values that are not supported, and GraphError for a damaged card.
    """
    settings = dict(config)
    prefill, increment, ge_config = (settings.pop(name, "") for name in _PATHS)
    name, kind = settings.pop("model_name", "common"), settings.pop("model_type", "mindir")
    if settings.pop("rank_id", 0) != 0:
        hint = "" if runs_graphs else "tensor_parallel splits a model over devices"
        raise UsageError("rank_id must be 0: this process is the first rank", hint=hint)
    device = _device(str(settings.pop("target", "auto")), settings.pop("device_id", 0), runs_graphs=runs_graphs)
    if device is not None:
        settings.setdefault("device", device)
    length = settings.pop("infer_seq_length", None)
    if runs_graphs:
        if kind != "mindir":
            raise UsageError(f"model_type must be mindir, got {kind}", hint=_EXPORT)
        folder = _mindir_folder(prefill, increment)
        settings["decoder"] = str(folder)
        if ge_config:
            settings["ge_config"] = os.fspath(ge_config)
        most = read_card(folder).config.context
        if length is not None and length > most:
            if length != _DEFAULT_LENGTH:
                warnings.warn(f"infer_seq_length {length}: the graphs take {most} tokens", stacklevel=4)
            length = most
    else:
        if increment:
            why = "one model makes the first token and the others"
            warnings.warn(f"increment_model_path has no effect: {why}", stacklevel=4)
        if ge_config:
            warnings.warn("ge_config_path has no effect: `mode` chooses the graphs of a device", stacklevel=4)
        if prefill or name != "common":
            settings["model"] = prefill or name
    if length is not None:
        settings.setdefault("context", length)
    return settings


def _device(target: str, index: int, *, runs_graphs: bool) -> str | None:
    """This package's name of a device; None for `auto`."""
    if target == "auto" and index == 0:
        return None
    if target == "auto" and not runs_graphs:
        from llama_adapter.runtime.devices import accelerator_kind

        kind = accelerator_kind()
        if kind is None:
            raise UsageError(f"There is no device {index}: no accelerator is installed", hint="leave device_id out")
        return f"{kind}:{index}"
    ours = our_device("Ascend" if target == "auto" else target, index=index)
    if ours is None:
        raise UsageError(f"No target named `{target}`", hint=f"Ascend, {'' if runs_graphs else 'GPU, '}CPU or auto")
    return ours


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
            return dict(zip(_PATHS, map(os.fspath, (prefill, increment)), strict=False))
        case str() | os.PathLike():
            place = find_model(os.fspath(model))
            if place.suffix in (".yaml", ".yml"):
                if (found := _of_yaml(place)) is not None:
                    return found
            elif (place / CARD_FILE).is_file() or any(place.glob("*.mindir")):
                return _of_folder(place)
    if is_required:
        wanted = "their folder, the pair of them, or a YAML file with a section `infer`"
        raise UsageError(f"`{model!s:.200}` names no MindIR graphs: wanted {wanted}", hint=_EXPORT)
    return None


def _mindir_folder(prefill: str, increment: str) -> Path:
    """The folder of two graphs. Raises UsageError unless its card names them, and GraphError for a damaged card."""
    if not prefill or not increment:
        raise UsageError("MindIR graphs are to be run, and `model` does not name a pair of them", hint=_EXPORT)
    paths = [Path(path).expanduser() for path in (prefill, increment)]
    folder = paths[0].parent
    if missing := [path for path in paths if not path.is_file()]:
        raise UsageError(f"The graph `{missing[0]}` does not exist", hint=_EXPORT)
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
        raise UsageError(f"`{folder}` has no {CARD_FILE}: {why}", hint=_EXPORT)
    card = read_card(folder)
    if card.format != "mindir":
        raise UsageError(f"The decoder in `{folder}` was exported as {card.format}, not as mindir", hint=_EXPORT)
    own = card.settings or {}
    return {kind: folder / str(own.get(kind)) for kind in ("prefill", "increment")}


def _of_yaml(path: Path) -> dict[str, Any] | None:
    """The section `infer` of a settings file, if it has one. Its paths may be relative to the file."""
    section = read_yaml(str(path)).get("infer")
    if not isinstance(section, Mapping):
        return None
    found = {name: value for name, value in section.items() if value not in (None, "")}
    return found | {name: str(path.parent / found[name]) for name in _PATHS if name in found}


def _of_folder(folder: Path) -> dict[str, Any]:
    """The fields for a folder: of at most one settings file, the graphs of its card, and a `config.ini`."""
    settings = sorted(folder.glob("*.y*ml"))
    if len(settings) > 1:
        names = ", ".join(path.name for path in settings)
        raise UsageError(f"`{folder}` has {len(settings)} files of settings ({names})", hint="keep one of them")
    found = (_of_yaml(settings[0]) if settings else None) or {}
    found |= dict(zip(_PATHS, map(str, _graphs_of(folder).values()), strict=False))
    if (folder / GE_CONFIG).is_file():
        found["ge_config_path"] = str(folder / GE_CONFIG)
    return found
