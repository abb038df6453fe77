"""`InferConfig`: the settings of MindSpore Lite's inference, and their conversion to settings of `pipeline`."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from llama_adapter.app.compat.mindir import EXPORT, PATHS, mindir_folder
from llama_adapter.llm.exported.card import read_card
from llama_adapter.runtime.device_names import our_device
from llama_adapter.runtime.errors import UsageError

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
    prefill, increment, ge_config = (settings.pop(name, "") for name in PATHS)
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
            raise UsageError(f"model_type must be mindir, got {kind}", hint=EXPORT)
        folder = mindir_folder(prefill, increment)
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
