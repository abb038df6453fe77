"""Opens the `model` argument of `pipeline`, in all its forms: a captioner, and defaults for calls."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.compat.importers import importer_of
from llama_adapter.app.compat.infer_config import graphs_of, lite_settings
from llama_adapter.app.models.models_by_name import FOREIGN_WEIGHTS, find_model, foreign_weights, model_settings
from llama_adapter.app.models.named.located import is_named
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.exported.card import CARD_FILE
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.setting import SECTIONS
from llama_adapter.runtime.settings.yaml_file import Table, read_yaml

_SPEC = frozenset(field.name for field in dataclasses.fields(CaptionerSpec)) | {"allowed_hosts"}
_CALL = {"question", "prompt", "input", "choices", *(field.name for field in dataclasses.fields(SamplingParams))}
_PATHS = ("model", "llama_dir", "adapter", "clip", "encoder")
_LITE = frozenset({"infer_seq_length", "device_id", "rank_id", "target", "prefill_model_path", "increment_model_path"})
_MINDSPORE = {"ms": "ms", "mindspore": "ms", "mslite": "mslite", "mindspore_lite": "mslite", "lite": "mslite"}


def open_model(model: Any, settings: Mapping[str, Any], *, backend: str) -> tuple[Captioner, dict[str, Any]]:
    """The captioner for the arguments `model` and `settings` of `pipeline`, and the other settings: defaults for calls.

    Raises UsageError, and what `Captioner.load` raises.
    """
    settings = dict(settings)
    is_checkpoint = False
    if (mindspore := _MINDSPORE.get(backend)) is not None:
        graphs = graphs_of(model, is_required=mindspore == "mslite")
        is_checkpoint = graphs is None
        if graphs is not None:
            found = lite_settings(graphs | settings, runs_graphs=True)
            return _load(found | {"decoder_backend": mindspore})
    if backend in ("onnx", "om"):
        settings.setdefault("vision", backend)
    elif backend != "torch" and not is_checkpoint:
        raise UsageError(f"No backend `{backend}`", hint="torch, onnx, om, ms or mslite")
    if isinstance(model, Captioner):
        if given := sorted(_SPEC & settings.keys()):
            raise UsageError(f"{', '.join(given)} cannot be changed: this captioner is loaded already")
        return model, settings
    if _LITE & settings.keys():
        if model is not None:
            settings.pop("model_name", None)
        settings = lite_settings({"model_name": "common", **settings})
    found = _settings_of(model) | settings
    if is_checkpoint:
        warnings.warn(f"backend `{backend}` has no effect: torch runs checkpoints, MindSpore runs graphs", stacklevel=3)
    return _load(found)


def _load(settings: dict[str, Any]) -> tuple[Captioner, dict[str, Any]]:
    own = {name: settings.pop(name) for name in _SPEC & settings.keys()}
    return Captioner.load(**own), settings


def _settings_of(model: Any) -> dict[str, Any]:
    """The settings, of the captioner and of calls, that the argument `model` stands for."""
    match model:
        case None:
            return {}
        case str() | os.PathLike():
            return {"model": name} if is_named(name := os.fspath(model)) else _of_path(find_model(name))
        case Mapping():
            return _of_mapping(model)
        case tuple() | list():
            return _of_files([os.fspath(path) for path in model])
    raise UsageError(
        f"model must be a name, a path, a pair of paths, settings or a Captioner, got {type(model).__name__}"
    )


def _of_path(place: Path) -> dict[str, Any]:
    """The settings for a path: a settings file, a folder with one YAML, an exported decoder, or another model."""
    if place.suffix in (".yaml", ".yml"):
        return _of_mapping(read_yaml(str(place)), source=str(place))
    if (place / CARD_FILE).is_file():
        return {"decoder": str(place)}
    files = sorted(place.glob("*.y*ml"))
    if len(files) != 1:
        try:
            return dict(model_settings(place))
        except UsageError as error:
            if files:
                names = ", ".join(path.name for path in files)
                error.hint = f"it has {len(files)} files of settings ({names}), and exactly one would be read"
            raise
    found = _of_mapping(read_yaml(str(files[0])), source=str(files[0]))
    for name in _PATHS:
        if isinstance(found.get(name), str) and (place / found[name]).exists():
            found[name] = str(place / found[name])
    if not {"model", "llama_dir", "decoder"} & found.keys():
        found |= model_settings(place)
    return found


def _of_mapping(data: Mapping[str, Any], *, source: str = "settings") -> dict[str, Any]:
    """Flat settings from a mapping: our settings, in sections or by name, an `InferConfig`, or another system's."""
    if "prefill_model_path" in data:
        lite = lite_settings(data)
        return (_settings_of(lite.pop("model")) if "model" in lite else {}) | lite
    importer = None if data.keys() <= {"command", *SECTIONS} else importer_of(data)
    if importer is not None:
        data = importer(data).check(source, is_file=isinstance(data, Table)).settings
    sections = {name for name, value in data.items() if name in SECTIONS and isinstance(value, Mapping)}
    if not sections:
        return {name: value for name, value in data.items() if value is not None}
    found: dict[str, Any] = {}
    for section, table in data.items():
        if section in sections:
            for name, value in table.items():
                if name in _SPEC | _CALL and value is not None:
                    found[name] = value
                elif value is not None:
                    warnings.warn(f"{source}: {section}.{name} has no effect in a pipeline", stacklevel=5)
        elif section != "command":
            raise UsageError(f"{source}: no section is named `{section}`", hint=f"sections are {', '.join(SECTIONS)}")
    return found


def _of_files(paths: list[str]) -> dict[str, Any]:
    """The settings for the files of LLaMA, an adapter and CLIP."""
    if foreign := [path for path in paths if path.endswith(FOREIGN_WEIGHTS)]:
        message, hint = foreign_weights(foreign[0])
        if foreign[0].endswith(".mindir"):
            hint = 'pairs of graphs that `llama-adapter export decoder` wrote run with backend="ms" or "mslite"'
        raise UsageError(message, hint=hint)
    if not 2 <= len(paths) <= 3:
        raise UsageError(f"A model of files is (llama_dir, adapter) or (llama_dir, adapter, clip), got {len(paths)}")
    llama = model_settings(find_model(paths[0]))
    if "llama_dir" not in llama:
        raise UsageError(f"`{paths[0]}` is a bundle, which has its adapter", hint="pass it alone")
    return {**llama, **dict(zip(("adapter", "clip"), paths[1:], strict=False))}
