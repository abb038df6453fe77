"""The `adapter_config.json` of a PEFT LoRA: which modules it changes, with which rank and scale.

The rules are those of PEFT: a name in a list is the end of a module's name, an expression matches the whole name.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import list_keys
from llama_adapter.runtime.text import shown_excerpt

CONFIG: Final = "adapter_config.json"
_ALL_LINEAR: Final = "all-linear"
_OF_LLAMA: Final = ("q_proj", "v_proj")  # what PEFT targets in a LLaMA if the config names nothing
_WHOLE_LLAMA: Final = (None, "CAUSAL_LM")  # task types without another head
_BASE_KEPT: Final = (True, False, None, "gaussian", "eva", "orthogonal")  # ways to initialise that keep the base
# Entries that change no weight: they describe the training or the file. PEFT ignores fan_in_fan_out for a LLaMA, whose
# linear weights are (outputs, inputs). A LLaMA has no biases, so `bias` selects nothing.
_IGNORED: Final = (
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_type", "peft_version", "task_type"),
    *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "runtime_config", "fan_in_fan_out", "bias"),
)
_USED: Final = (
    *("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "init_lora_weights"),
    "ensure_weight_tying",
)
_MOST_RANK: Final = 1 << 20
_MERGE: Final = "merge it with PEFT (`merge_and_unload`, then `save_pretrained`), and name the result as --llama-dir"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A checked `adapter_config.json`. Module names are those of transformers, such as `model.layers.0.mlp.up_proj`."""

    path: Path
    rank: int
    alpha: float
    is_rank_stabilised: bool
    is_dora: bool
    ties_weights: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | Sequence[str]
    excluded: str | Sequence[str]
    saved: Sequence[str]  # modules whose whole weights are in the file
    layers: Sequence[int]  # empty: all
    layers_pattern: Sequence[str]
    base: str | None  # name of the model that it was trained on

    def targeted(self, linear: Sequence[str], embeddings: Sequence[str]) -> list[str]:
        """The modules that have low-rank factors, of the linear layers (the head comes last) and the embeddings.

        Raises CheckpointError if a name or the expression matches none of them.
        """
        modules = [*embeddings, *linear]
        if isinstance(self.targets, str) and self.targets.lower() == _ALL_LINEAR:
            matched = list(linear[:-1])
        else:
            names = [self.targets] if isinstance(self.targets, str) else self.targets
            idle = [name for name in names if not any(self._matches(name, module) for module in modules)]
            if idle:
                raise CheckpointError(
                    f"`{self.path}` targets {list_keys(idle)}, and a LLaMA has no such linear layer or embedding",
                    hint=f"its modules are {list_keys(sorted({module.rpartition('.')[2] for module in modules}))}; "
                    "take other names out of `target_modules` if the LoRA has no tensors for them",
                )
            matched = [module for module in modules if any(self._matches(name, module) for name in names)]
        return [module for module in matched if not self._is_excluded(module) and self._is_in_layers(module)]

    def unmatched_saved(self, modules: Sequence[str]) -> list[str]:
        """The entries of `saved` that match no module."""
        return [name for name in self.saved if not any(_is_within(name, module) for module in modules)]

    def is_saved(self, module: str) -> bool:
        """Whether the file has the whole weight of a module: PEFT saves modules whose names end in an entry."""
        return any(_is_within(name, module) for name in self.saved)

    def rank_of(self, module: str) -> int:
        """The rank of a module's factors."""
        return int(self._patterned(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of a module's low-rank product."""
        rank = self.rank_of(module)
        alpha = self._patterned(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def _matches(self, name: str, module: str) -> bool:
        if isinstance(self.targets, str):
            return self._match(name, module, is_whole=True) is not None
        return module == name or module.endswith(f".{name}")

    def _is_excluded(self, module: str) -> bool:
        if any(self._match(rf"(^|.*\.){name}($|\..*)", module) for name in self.saved):
            return True
        if isinstance(self.excluded, str):
            return self._match(self.excluded, module, is_whole=True) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.excluded)

    def _is_in_layers(self, module: str) -> bool:
        if isinstance(self.targets, str) or not self.layers or module in self.targets:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next(filter(None, (self._match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found[found.lastindex or 0]) in self.layers

    def _patterned(self, patterns: Mapping[str, float], module: str, default: float) -> float:
        matches = (value for key, value in patterns.items() if self._match(rf"(.*\.)?({key})$", module))
        return next(matches, default)

    def _match(self, pattern: str, module: str, *, is_whole: bool = False) -> re.Match[str] | None:
        try:
            return re.fullmatch(pattern, module) if is_whole else re.match(pattern, module)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"`{self.path}` has {shown_excerpt(repr(pattern))}, which is no regular expression: "
                f"{shown_excerpt(str(error))}",
                hint="PEFT cannot read it either; copy the file again from where the folder came from",
            ) from None


def read_config(folder: Path) -> PeftConfig:
    """Read the config of a LoRA folder. Raises CheckpointError for one that is damaged or is computed differently."""
    path = folder / CONFIG
    config = read_json(path)
    if (kind := config.get("peft_type")) != "LORA":
        hint = "--past-key-values reads it" if kind == "PREFIX_TUNING" else _MERGE
        raise CheckpointError(
            f"`{folder}` is a PEFT adapter of type {shown_excerpt(str(kind))}, and LORA is wanted", hint=hint
        )
    if (task := config.get("task_type")) not in _WHOLE_LLAMA:
        raise CheckpointError(
            f"`{folder}` is a LoRA for the task {shown_excerpt(str(task))}, and CAUSAL_LM is wanted",
            hint="its model has another head than a LLaMA that writes text; use a LoRA for causal language models",
        )
    if (init := config.get("init_lora_weights")) not in _BASE_KEPT or not isinstance(init, bool | str | None):
        raise CheckpointError(
            f"`{path}` has init_lora_weights {shown_excerpt(str(init))}, which changes the base model's weights too",
            hint="save it in PEFT with `path_initial_model_for_weight_conversion`, or " + _MERGE,
        )
    unknown = [name for name, value in config.items() if name not in _IGNORED + _USED and _says_something(value)]
    if unknown:
        raise CheckpointError(f"`{path}` sets {list_keys(unknown)}, which is not supported here", hint=_MERGE)
    read = _Entries(path, config)
    targets = read.names("target_modules", _OF_LLAMA, or_expression=True)
    return PeftConfig(
        path=path,
        rank=read.rank(config.get("r", 8), "r"),
        alpha=read.number(config.get("lora_alpha", 8), "lora_alpha"),
        is_rank_stabilised=read.flag("use_rslora"),
        is_dora=read.flag("use_dora"),
        ties_weights=read.flag("ensure_weight_tying"),
        rank_pattern={key: read.rank(value, "rank_pattern") for key, value in read.pattern("rank_pattern")},
        alpha_pattern={key: read.number(value, "alpha_pattern") for key, value in read.pattern("alpha_pattern")},
        targets=targets,
        excluded=read.names("exclude_modules", (), or_expression=True),
        saved=read.names("modules_to_save", ()),
        layers=read.layers(),
        layers_pattern=read.patterns("layers_pattern"),
        base=base if isinstance(base := config.get("base_model_name_or_path"), str) and base else None,
    )


def _is_within(ending: str, module: str) -> bool:
    """Whether the name of a module, or of one that contains it, ends so."""
    steps = module.split(".")
    return any(".".join(steps[: count + 1]).endswith(ending) for count in range(len(steps)))


def _says_something(value: object) -> bool:
    return value not in (None, False, "") and value != [] and value != {}


@dataclass(frozen=True, slots=True)
class _Entries:
    """Checks the types of entries. Every method raises CheckpointError for another type."""

    path: Path
    config: Mapping[str, Any]

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"`{self.path}` has {shown_excerpt(repr(value))} for `{name}`, where {wanted} is wanted",
            hint="the file is damaged or was changed by hand; copy the folder again",
        )

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def rank(self, value: object, name: str) -> int:
        if type(value) is not int or not 0 < value < _MOST_RANK:
            raise self.wrong(name, value, "a whole number of at least 1")
        return value

    def number(self, value: object, name: str) -> float:
        if type(value) not in (int, float) or not abs(value) < 1e30:  # type: ignore[arg-type]
            raise self.wrong(name, value, "a number")
        return float(value)  # type: ignore[arg-type]

    def pattern(self, name: str) -> Iterable[tuple[str, object]]:
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value.items()

    def names(self, name: str, default: Sequence[str], *, or_expression: bool = False) -> Any:
        value = self.config.get(name)
        if value is None:
            return default
        if or_expression and isinstance(value, str) and value:
            return value
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise self.wrong(name, value, "a list of names" + (" or a regular expression" if or_expression else ""))
        return tuple(value)

    def patterns(self, name: str) -> Sequence[str]:
        value = self.config.get(name)
        return (value,) if isinstance(value, str) and value else self.names(name, ()) if value else ()

    def layers(self) -> Sequence[int]:
        value = self.config.get("layers_to_transform")
        found = [value] if type(value) is int else [] if value is None else value
        if not isinstance(found, list) or any(type(one) is not int for one in found):
            raise self.wrong("layers_to_transform", value, "a number or a list of numbers")
        return tuple(found)
