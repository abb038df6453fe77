"""The `adapter_config.json` of a PEFT LoRA: which modules it changes, with which rank and scale.

The rules are those of PEFT: a name in a list is the end of a module's name, an expression matches the whole name.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import list_keys
from llama_adapter.runtime.text import shown_excerpt

CONFIG: Final = "adapter_config.json"
_MERGE: Final = "merge it with PEFT (`merge_and_unload`, then `save_pretrained`), and name the result as --llama-dir"
_BASE_KEPT: Final = ("True", "False", "None", "gaussian", "eva", "orthogonal")  # initialisations that keep the base


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 20


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # type: ignore[arg-type]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _are_names_or_text(value: object) -> bool:
    return _are_names(value) or (isinstance(value, str) and value != "")


def _are_layers(value: object) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(one) is int for one in value))


def _by_pattern(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))


# The entries that are used: default, check and its description. By default, PEFT changes these modules of a LLaMA.
_ENTRIES: Final[Mapping[str, tuple[Any, Callable[[object], bool], str]]] = {
    "r": (8, _is_rank, "a whole number of at least 1"),
    "lora_alpha": (8, _is_number, "a number"),
    "rank_pattern": ({}, _by_pattern(_is_rank), "an object with whole numbers of at least 1"),
    "alpha_pattern": ({}, _by_pattern(_is_number), "an object with numbers"),
    "target_modules": (["q_proj", "v_proj"], _are_names_or_text, "a list of names or a regular expression"),
    "exclude_modules": ([], _are_names_or_text, "a list of names or a regular expression"),
    "modules_to_save": ([], _are_names, "a list of names"),
    "layers_to_transform": ([], _are_layers, "a number or a list of numbers"),
    "layers_pattern": ([], lambda value: value == "" or _are_names_or_text(value), "a list of names"),
    **dict.fromkeys(("use_rslora", "use_dora", "ensure_weight_tying"), (False, _is_flag, "true or false")),
}
# Entries that change no weight: they describe the training or the file. PEFT ignores fan_in_fan_out for a LLaMA, whose
# linear weights are (outputs, inputs). A LLaMA has no biases, so `bias` selects nothing.
_IGNORED: Final = (
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_type", "peft_version", "task_type"),
    *("inference_mode", "init_lora_weights", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "runtime_config", "fan_in_fan_out", "bias"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A checked `adapter_config.json`. Module names are those of transformers, such as `model.layers.0.mlp.up_proj`."""

    path: Path
    base: str | None  # name of the model that it was trained on
    entries: Mapping[str, Any]  # those of `_ENTRIES`

    def targeted(self, linear: Sequence[str], embeddings: Sequence[str]) -> list[str]:
        """The modules that have low-rank factors, of the linear layers (the head comes last) and the embeddings.

        Raises CheckpointError if a name or the expression matches none of them.
        """
        modules, targets = [*embeddings, *linear], self.entries["target_modules"]
        if isinstance(targets, str) and targets.lower() == "all-linear":
            matched = list(linear[:-1])
        else:
            parts = [targets] if isinstance(targets, str) else [[name] for name in targets]
            if idle := [part for part in parts if not any(self._matches(part, module) for module in modules)]:
                raise CheckpointError(
                    f"`{self.path}` targets {list_keys([part if isinstance(part, str) else part[0] for part in idle])}"
                    ", and a LLaMA has no such linear layer or embedding",
                    hint=f"its modules are {list_keys(sorted({module.rpartition('.')[2] for module in modules}))}; "
                    "take other names out of `target_modules` if the LoRA has no tensors for them",
                )
            matched = [module for module in modules if self._matches(targets, module) and self._is_in_layers(module)]
        excluded = self.entries["exclude_modules"]
        saved = [rf"(^|.*\.){name}($|\..*)" for name in self.entries["modules_to_save"]]
        return [
            module
            for module in matched
            if not self._matches(excluded, module) and not any(self._match(name, module) for name in saved)
        ]

    def saved(self, modules: Sequence[str]) -> list[str]:
        """The modules whose whole weights are in the file: PEFT looks at the ends of their and their parents' names.

        Raises CheckpointError if an entry matches none of them.
        """
        names = self.entries["modules_to_save"]
        found = {name: [module for module in modules if _is_within(name, module)] for name in names}
        if idle := [name for name, matched in found.items() if not matched]:
            raise CheckpointError(
                f"`{self.path}` has {list_keys(idle)} in `modules_to_save`, and a LLaMA has no such module",
                hint="the LoRA was trained on a model with other parts; use one for this LLaMA",
            )
        return [module for matched in found.values() for module in matched]

    def rank_of(self, module: str) -> int:
        """The rank of a module's factors."""
        return int(self._patterned("rank_pattern", module, self.entries["r"]))

    def scale_of(self, module: str) -> float:
        """The factor of a module's low-rank product."""
        rank = self.rank_of(module)
        alpha = self._patterned("alpha_pattern", module, self.entries["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.entries["use_rslora"] else rank)

    def _matches(self, names: str | Sequence[str], module: str) -> bool:
        if isinstance(names, str):
            return self._match(names, module, is_whole=True) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _is_in_layers(self, module: str) -> bool:
        layers, given = self.entries["layers_to_transform"], self.entries["layers_pattern"]
        targets = self.entries["target_modules"]
        if isinstance(targets, str) or layers == [] or module in targets:
            return True
        given = [given] if isinstance(given, str) and given else given
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in given] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        found = next(filter(None, (self._match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found["idx"]) in ([layers] if isinstance(layers, int) else layers)

    def _patterned(self, entry: str, module: str, default: float) -> float:
        patterns = self.entries[entry].items()
        return next((value for key, value in patterns if self._match(rf"(.*\.)?({key})$", module)), default)

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
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise CheckpointError(
            f"`{folder}` is a LoRA for the task {shown_excerpt(str(task))}, and CAUSAL_LM is wanted",
            hint="its model has another head than a LLaMA that writes text; use a LoRA for causal language models",
        )
    if (init := str(config.get("init_lora_weights"))) not in _BASE_KEPT:
        raise CheckpointError(
            f"`{path}` has init_lora_weights {shown_excerpt(init)}, which changes the base model's weights too",
            hint="save it in PEFT with `path_initial_model_for_weight_conversion`, or " + _MERGE,
        )
    known = (*_ENTRIES, *_IGNORED)
    if unknown := [
        name for name, value in config.items() if name not in known and value not in (None, False, "", [], {})
    ]:
        raise CheckpointError(f"`{path}` sets {list_keys(unknown)}, which is not supported here", hint=_MERGE)
    for name, (_, is_right, wanted) in _ENTRIES.items():
        if (value := config.get(name)) is not None and not is_right(value):
            raise CheckpointError(
                f"`{path}` has {shown_excerpt(repr(value))} for `{name}`, where {wanted} is wanted",
                hint="the file is damaged or was changed by hand; copy the folder again",
            )
    entries = {
        name: default if config.get(name) is None else config[name] for name, (default, _, _) in _ENTRIES.items()
    }
    base = config.get("base_model_name_or_path")
    return PeftConfig(path=path, base=base if isinstance(base, str) and base else None, entries=entries)


def _is_within(ending: str, module: str) -> bool:
    """Whether the name of a module, or of one that contains it, ends so."""
    steps = module.split(".")
    return any(".".join(steps[: count + 1]).endswith(ending) for count in range(len(steps)))
