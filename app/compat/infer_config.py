"""`InferConfig`: the settings of MindSpore Lite's inference, and their conversion to settings of `pipeline`."""

import warnings
from collections.abc import Mapping
from typing import Any

from llama_adapter.runtime.device_names import our_device
from llama_adapter.runtime.errors import UsageError


class InferConfig(dict[str, Any]):
    """A dict with the fields of MindSpore Lite's `InferConfig`. The fields are also attributes."""

    def __init__(
        self,
        prefill_model_path: str = "",
        increment_model_path: str = "",
        model_type: str = "mindir",
        model_name: str = "common",
        infer_seq_length: int = 1024,
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


def lite_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `pipeline`, including `model`, for the fields of an `InferConfig`.

    Warns about fields without effect. Raises UsageError for values that are not supported.
    """
    settings = dict(config)
    path, name = settings.pop("prefill_model_path", ""), settings.pop("model_name", "common")
    for field, why in (
        ("increment_model_path", "one model makes the first token and the others"),
        ("ge_config_path", "`mode` chooses the graphs of a device"),
    ):
        if settings.pop(field, ""):
            warnings.warn(f"{field} has no effect: {why}", stacklevel=4)
    settings.pop("model_type", None)
    if settings.pop("rank_id", 0) != 0:
        raise UsageError(
            "rank_id must be 0: this process is the first rank", hint="tensor_parallel splits a model over devices"
        )
    if path or name != "common":
        settings["model"] = path or name
    length = settings.pop("infer_seq_length", None)
    if length is not None:
        settings.setdefault("context", length)
    device = _device(str(settings.pop("target", "auto")), settings.pop("device_id", 0))
    if device is not None:
        settings.setdefault("device", device)
    return settings


def _device(target: str, index: int) -> str | None:
    """This package's name of a device; None for `auto`."""
    if target == "auto":
        if index == 0:
            return None
        from llama_adapter.runtime.devices import accelerator_kind

        kind = accelerator_kind()
        if kind is None:
            raise UsageError(f"There is no device {index}: no accelerator is installed", hint="leave device_id out")
        return f"{kind}:{index}"
    ours = our_device(target, index=index)
    if ours is None:
        raise UsageError(f"No target named `{target}`", hint="Ascend, GPU, CPU or auto")
    return ours
