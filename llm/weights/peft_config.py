"""The `adapter_config.json` of a PEFT LoRA: which modules it changes, with which rank and scale.

The rules are those of PEFT: a name in a list is the end of a module's name, an expression matches the whole name.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.text import shown_excerpt

if TYPE_CHECKING:  # it imports torch, which the hint for a folder does without
    from llama_adapter.runtime.tensor_files.files import Shape

CONFIG: Final = "adapter_config.json"
_TRIAL_S: Final = 5.0  # for all expressions of a config on the names of all modules, in another process
_TRIAL: Final = """import contextlib, json, re, sys
for one in json.load(sys.stdin):
    with contextlib.suppress(Exception):
        re.fullmatch(*one)
"""
MERGE: Final = "merge it with PEFT (`merge_and_unload`, then `save_pretrained`), and name the result as --llama-dir"

# Values that are supported, and hints for others. Other initialisations change the base model's weights too.
_SUPPORTED: Final[Mapping[str, tuple[Sequence[Any], str]]] = {
    "peft_type": (
        ["LORA"],
        f"--past-key-values reads PREFIX_TUNING; `mlx_lm.fuse` merges that of mlx-lm; for others, if PEFT can, {MERGE}",
    ),
    "task_type": (
        [None, "CAUSAL_LM"],
        "models for other tasks have another head; use a LoRA for causal language models",
    ),
    "init_lora_weights": (
        [None, True, False, "gaussian", "eva", "orthogonal", "mica"],
        f"save it in PEFT with `path_initial_model_for_weight_conversion`, or {MERGE}",
    ),
}
_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "flag": lambda value: type(value) is bool,
    "text": lambda value: type(value) is str,
    "whole": lambda value: type(value) is int,
    "rank": lambda value: type(value) is int and value > 0,
    "number": lambda value: type(value) in (int, float) and abs(value) < 1e30,
}
# Other entries that are used: default, type, kind of the value or of those in it, and a description.
_ENTRIES: Final[Mapping[str, tuple[Any, tuple[type, ...], str, str]]] = {
    "base_model_name_or_path": ("", (str,), "text", "a name"),
    "r": (8, (int,), "rank", "a whole number of at least 1"),
    "lora_alpha": (8, (int, float), "number", "a number"),
    "rank_pattern": ({}, (dict,), "rank", "an object with whole numbers of at least 1"),
    "alpha_pattern": ({}, (dict,), "number", "an object with numbers"),
    "target_modules": (["q_proj", "v_proj"], (list, str), "text", "a list of names or a regular expression"),
    "exclude_modules": ([], (list, str), "text", "a list of names or a regular expression"),
    "modules_to_save": ([], (list,), "text", "a list of names"),
    "layers_to_transform": ([], (list, int), "whole", "a number or a list of numbers"),
    "layers_pattern": ([], (list, str), "text", "a list of names"),
    **dict.fromkeys(("use_rslora", "use_dora", "ensure_weight_tying"), (False, (bool,), "flag", "true or false")),
}
# Entries that change no weight: they describe the training or the file. PEFT ignores fan_in_fan_out for a LLaMA, whose
# linear weights are (outputs, inputs). Biases that `bias` trains are in the file, and refused there.
_IGNORED: Final = (
    *("auto_mapping", "revision", "peft_version", "inference_mode", "lora_dropout", "megatron_core"),
    *("qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    *("fan_in_fan_out", "bias", "merge_weights"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A checked `adapter_config.json`. Module names are those of transformers, such as `model.layers.0.mlp.up_proj`."""

    path: Path
    entries: Mapping[str, Any]  # those of `_ENTRIES`

    def changed(self, modules: "Mapping[str, Shape]") -> tuple[set[str], set[str]]:
        """The modules that have low-rank factors, and those whose whole weights are in the file.

        `modules` are all modules of a LLaMA with the shapes of their weights; embedding and head are the first and the
        last one. Raises CheckpointError if all names of an entry, or its expression, match none of them.
        """
        self._require_quick(modules)
        matrices = [module for module, shape in modules.items() if len(shape) == 2]
        targets, kept = self.entries["target_modules"], self.entries["modules_to_save"]
        is_linear = isinstance(targets, str) and targets.lower() == "all-linear"
        targeted = matrices[1:-1] if is_linear else [one for one in matrices if self._is_named("target_modules", one)]
        # PEFT looks at the ends of the names of modules and of their parents.
        saved = {module for module in modules if any(f"{name}." in f"{module}." for name in kept)}
        for entry, found, known in (("target_modules", targeted, matrices), ("modules_to_save", saved, modules)):
            if (names := self.entries[entry]) and not found:  # a list may have names of other models too
                ends = sorted({module.rpartition(".")[2] for module in known})
                shown = list_keys([names] if isinstance(names, str) else names)
                raise CheckpointError(
                    f"`{self.path}` has {shown} in `{entry}`, where a LLaMA has {list_keys(ends)}",
                    hint=f"name the model that the LoRA was trained on as --llama-dir; otherwise {MERGE}",
                )
        return {
            module
            for module in targeted
            if self._is_in_layers(module)
            and not self._is_named("exclude_modules", module)
            and not any(f".{name}." in f".{module}." for name in kept)
        }, saved

    def rank_of(self, module: str) -> int:
        """The rank of a module's factors."""
        return int(self._patterned("rank_pattern", module, self.entries["r"]))

    def scale_of(self, module: str) -> float:
        """The factor of a module's low-rank product."""
        rank = self.rank_of(module)
        alpha = self._patterned("alpha_pattern", module, self.entries["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.entries["use_rslora"] else rank)

    def _is_in_layers(self, module: str) -> bool:
        layers = self.entries["layers_to_transform"]
        targets = self.entries["target_modules"]
        if isinstance(targets, str) or layers == [] or module in targets:
            return True
        given = self.entries["layers_pattern"] or r"[^.]*"
        found = (self._match(_of_layers(one), module) for one in ([given] if isinstance(given, str) else given))
        layer = next((match["idx"] for match in found if match), None)
        return layer is not None and int(layer) in ([layers] if isinstance(layers, int) else layers)

    def _require_quick(self, modules: Collection[str]) -> None:
        """Raise CheckpointError for expressions that backtrack for long: nothing ends a match in this process."""
        entries = self.entries
        whole = [one for name in ("target_modules", "exclude_modules") if isinstance(one := entries[name], str)]
        ends = [*entries["rank_pattern"], *entries["alpha_pattern"]]
        layers = [given] if isinstance(given := entries["layers_pattern"], str) else given
        if not re.search(r"[*+?{]", "".join([*whole, *ends, *layers])):  # nothing is repeated
            return
        patterns = [*whole, *map(_of_end, ends), *map(_of_layers, layers)]
        asked = json.dumps([(one, module) for one in patterns for module in modules])
        command = [sys.executable, "-IS", "-c", _TRIAL]
        try:
            subprocess.run(command, input=asked.encode(), stderr=subprocess.DEVNULL, timeout=_TRIAL_S, check=False)
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"`{self.path}` has a regular expression that is matched for more than {_TRIAL_S:.0f} s",
                hint="write the names of the modules as a list in its place",
            ) from None

    def _patterned(self, entry: str, module: str, default: float) -> float:
        patterns = self.entries[entry].items()
        return next((value for key, value in patterns if self._match(_of_end(key), module)), default)

    def _is_named(self, entry: str, module: str) -> bool:
        """Whether an entry names a module: names are ends of the modules' names, an expression matches a whole one."""
        given = self.entries[entry]
        if isinstance(given, str):
            return self._match(given, module) is not None
        return f".{module}".endswith(tuple(f".{name}" for name in given))

    def _match(self, pattern: str, module: str) -> re.Match[str] | None:
        try:
            return re.fullmatch(pattern, module)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"`{self.path}` has {shown_excerpt(repr(pattern))}, which is no regular expression: "
                f"{shown_excerpt(str(error))}",
                hint="PEFT cannot read it either; copy the file again from where the folder came from",
            ) from None


def lora_hint(folder: Path) -> str | None:
    """The hint for a folder that is named as a model and holds a LoRA; None if it holds none."""
    hint = "it holds a LoRA of PEFT: name it as --lora, and the model that it was trained on as --llama-dir"
    return hint if (folder / CONFIG).is_file() else None


def read_config(folder: Path) -> PeftConfig:
    """Read the config of a LoRA folder. Raises CheckpointError for one that is damaged or is computed differently."""
    path = folder / CONFIG
    config = read_json(path)
    for name, (allowed, hint) in _SUPPORTED.items():
        if (value := config.get(name)) not in allowed:
            wanted = ", ".join(str(one) for one in allowed if one is not None)
            raise _wrong(path, name, value, wanted, hint)
    others = config.keys() - {*_SUPPORTED, *_ENTRIES, *_IGNORED}
    if unknown := sorted(name for name in others if config[name] not in (None, False, "", [], {})):
        raise CheckpointError(f"`{path}` sets {list_keys(unknown)}, which is not supported here", hint=MERGE)
    return PeftConfig(path=path, entries=_checked(path, config))


def made_config(path: Path, **values: Any) -> PeftConfig:
    """The config of a LoRA in another format, whose values are in `path`; both `r` and `lora_alpha` must be there.

    Raises CheckpointError for a wrong value.
    """
    for name in ("r", "lora_alpha"):
        if values[name] is None:
            raise _wrong(path, name, None, _ENTRIES[name][3], "the scale of a LoRA is not guessed; use its own file")
    return PeftConfig(path=path, entries=_checked(path, values))


def _checked(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are used, with defaults."""
    entries = {}
    for name, (default, types, kind, wanted) in _ENTRIES.items():
        value = default if config.get(name) is None else config[name]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if not isinstance(value, types) or not all(map(_KINDS[kind], parts)):
            raise _wrong(path, name, value, wanted, "the file is damaged or was changed by hand; copy the folder again")
        entries[name] = value
    return entries


def _of_end(key: str) -> str:
    return rf"(.*\.)?({key})"


def _of_layers(pattern: str) -> str:
    return rf"(.*?\.)??{pattern}\.(?P<idx>\d+)\..*"


def _wrong(path: Path, name: str, value: object, wanted: str, hint: str) -> CheckpointError:
    said = f"`{path}` has {shown_excerpt(repr(value))} for `{name}`, where {wanted} is wanted"
    return CheckpointError(said, hint=hint)
