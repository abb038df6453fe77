"""Converts settings of MindFormers, MindSpore Lite, PaddleNLP and ModelRunner to settings of this package.

`foreign_keys.toml` says what becomes of each key, and names the rules and conditions that are here.
"""

import shlex
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llama_adapter.app.compat.imported import EXPORT, Import, Imported, Rule
from llama_adapter.app.models.models_by_name import (
    FOREIGN_WEIGHTS,
    bundle_folder,
    find_model,
    foreign_weights,
    model_settings,
)
from llama_adapter.llm.exported.card import CARD_FILE, read_card
from llama_adapter.runtime.device_names import our_device
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.schemes import QUANTISED

PADDLENLP_EXAMPLE = "hello world, how are you?"  # of predictor.py, which asks it if no data_file is named
_OF_FOLDER = "the model's folder says so; transformers makes the texts of families without a decoder here"
_ONLY_TENSOR_PARALLEL = "model_parallel splits a decoder; `parallel.engine: ray` gives pictures to several"
_ROUNDED = {"computation.precision": "int8", "computation.operators": "w8a8"}  # weights and inputs of 8 bits
_SAMPLING = ("temperature", "top_k", "top_p")
_FRACTIONS = ("generation.repetition_penalty", "generation.temperature", "generation.top_p")

Condition = Callable[[Import, Any], bool]  # takes the key's value

_KEYS = tomllib.loads(Path(__file__).with_name("foreign_keys.toml").read_text(encoding="utf-8"))


# Rules for one key


def number(setting: str, note: str = "") -> Rule:
    """A rule for a key that is a number and becomes a setting: any for `_FRACTIONS`, others are whole numbers."""
    least = 0 if setting == "generation.seed" else 1

    def rule(imported: Import, key: str, value: Any) -> None:
        if setting in _FRACTIONS and (isinstance(value, bool) or not isinstance(value, (int, float))):
            imported.refuse(key, f"wanted a number, got {value!r}")
        elif setting not in _FRACTIONS and (type(value) is not int or value < least):
            imported.refuse(key, f"wanted a whole number of at least {least}, got {value!r}")
        else:
            imported.take(key, {setting: value}, note)

    return rule


def one_of(values: Mapping[str, Mapping[str, Any] | str], *, otherwise: str) -> Rule:
    """A rule for a key whose value stands for settings or a reason to ignore it, as in `values`; others are refused."""

    def rule(imported: Import, key: str, value: Any) -> None:
        name = f"{value:g}" if isinstance(value, float) else str(value)
        found = values.get(name) if isinstance(value, (str, int, float)) else None
        if found is None:
            wanted = " or ".join(name for name, settings in values.items() if not isinstance(settings, str))
            imported.refuse(key, f"wanted {wanted}, got {value!r}; {otherwise}")
        elif isinstance(found, str):
            imported.ignore(key, found)
        elif not found:
            imported.ignore(key, f"{value!r} is the default")
        else:
            imported.take(key, found)

    return rule


def taken(settings: Mapping[str, Any], note: str = "") -> Rule:
    """A rule for a key that becomes these settings. In a text, or a list of texts, `{}` stands for the key's value."""

    def rule(imported: Import, key: str, value: Any) -> None:
        found = dict(settings)
        for name, given in settings.items():
            if isinstance(given, str):
                found[name] = given.format(value)
            elif isinstance(given, list):
                found[name] = [text.format(value) for text in given]
        imported.take(key, found, note)

    return rule


def ignored(reason: str) -> Rule:
    """A rule for a key that has no effect."""
    return lambda imported, key, value: imported.ignore(key, reason)


def refused(reason: str) -> Rule:
    """A rule for a key that is not supported. The reason may contain `{value!r}`."""
    return lambda imported, key, value: imported.refuse(key, reason.format(value=value))


def ignored_if(when: Condition, reason: str, otherwise: Rule) -> Rule:
    """A rule for a key that has no effect if `when` returns True for its value; else the rule `otherwise` applies."""

    def rule(imported: Import, key: str, value: Any) -> None:
        (ignored(reason) if when(imported, value) else otherwise)(imported, key, value)

    return rule


def device(name_key: str, index_key: str) -> dict[str, Rule]:
    """The rules for the keys of a device and its index; "" if there is none for the index."""

    def by_name(imported: Import, key: str, value: Any) -> None:
        ours = our_device(str(value), index=imported.value(index_key, 0) if index_key else None)
        if ours is None:
            imported.refuse(key, f"there is no device named {value!r}: wanted Ascend, GPU or CPU")
        else:
            imported.take(key, {"computation.device": ours})

    def by_index(imported: Import, key: str, value: Any) -> None:
        if imported.value(name_key) is not None:
            imported.ignore(key, "it is part of computation.device")
        elif value == 0:
            imported.ignore(key, "the first device is the default")
        else:
            imported.take(key, {"computation.device": our_device("Ascend", index=value)}, "Ascend is the default there")

    return {name_key: by_name, index_key: by_index} if index_key else {name_key: by_name}


def model(imported: Import, key: str, value: Any) -> None:
    """The rule for a key that names the model, or the folder of an exported one."""
    if not isinstance(value, str):
        imported.refuse(key, f"wanted a path or a name, got {value!r}")
        return
    try:
        place = find_model(value)
        if not imported.is_export and (place / CARD_FILE).is_file():
            _take_exported(imported, key, place)
        else:
            imported.take(key, {f"model.{name}": found for name, found in model_settings(place).items()})
    except UsageError as error:
        if value.endswith(FOREIGN_WEIGHTS):
            imported.refuse(key, f"{error.message}: {error.hint}")
        else:
            imported.take(key, {"model.model": value}, error.message)


def _take_exported(imported: Import, key: str, folder: Path) -> None:
    """Take the folder of an exported decoder. Raises GraphError for a damaged card."""
    backend = {"computation.decoder_backend": "mslite"} if read_card(folder).format == "mindir" else {}
    imported.take(key, {"computation.decoder": str(folder), **backend})


# Rules for several systems


def _do_sample(imported: Import, key: str, value: Any) -> None:
    """The rule for the switch of sampling, which is off unless it is True."""
    paths = ("generation_config.temperature", key.replace("do_sample", "temperature"), f"{_CONFIG}.temperature")
    given = (found for path in paths if (found := imported.value(path)) is not None)
    imported.take(key, {"generation.temperature": next(given, 1.0) if value is True else 0.0})


def _drawn(imported: Import, key: str, value: Any) -> None:
    """The rule for temperature, top_k and top_p, which matter if tokens are drawn."""
    if imported.is_export:
        imported.ignore(key, "an export does not need it")
    elif imported.is_sampled and value == 0 and key.endswith("top_k"):
        imported.ignore(key, "0 keeps all tokens, as is the default")
    elif imported.is_sampled:
        number(f"generation.{key.rpartition('.')[2]}")(imported, key, value)
    else:
        imported.ignore(key, "the most probable token is taken (generation.temperature: 0)")


def _set_sampling(imported: Import) -> None:
    """Set the temperature and top_p that no key gave."""
    imported.set("generation.temperature", 1.0 if imported.is_sampled else 0.0)
    if imported.is_sampled:
        imported.set("generation.top_p", 1.0)


# MindFormers: a YAML, with the `infer` table of MindSpore Lite; options of run_infer_main.py

_CONFIG = "model.model_config"
_TRAIN = "`llama-adapter train` trains adapters"
_COMMANDS = {"train": _TRAIN, "finetune": _TRAIN, "eval": "`llama-adapter eval` scores answers"}


def _run_mode(imported: Import, key: str, value: Any) -> None:
    if value in ("predict", "predict_with_train_model"):
        imported.take(key, {"command": "generate"})
    elif value == "export":
        imported.take(key, {"command": EXPORT, "output.graph_format": "mindir"})
    else:
        command = _COMMANDS.get(str(value), "`llama-adapter --help` lists the commands")
        imported.refuse(key, f"{value!r}: this file becomes settings of `generate`; {command}")


def _prompts(imported: Import, key: str, value: Any) -> None:
    texts = [str(text) for text in (value if isinstance(value, list) else [value])]
    if value is True or not texts:
        imported.refuse(key, "wanted a text, got none")
    elif all(text.endswith((".txt", ".json", ".jsonl")) for text in texts):
        imported.take(key, {"prompt.prompt_file": texts, "prompt.raw": True})
    else:
        prompt = texts[0] if len(texts) == 1 else texts
        imported.take(key, {"prompt.prompt": prompt, "prompt.raw": True}, "continued without a template")


def _parallel(imported: Import, key: str, value: Any) -> None:
    if value is not True:
        imported.ignore(key, "one device is the default")
        return
    size, note = imported.value("parallel_config.model_parallel", 1), "parallel_config.model_parallel"
    others = ["data_parallel", "pipeline_stage"]
    if size == 1 and imported.value("worker_num") is not None:
        size, note, others = imported.value("worker_num"), "the launcher's number of devices", ["pipeline_stage"]
    for other in others:
        if (parts := imported.value(f"parallel_config.{other}", 1)) != 1:
            imported.refuse(key, f"parallel_config.{other} is {parts!r}: {_ONLY_TENSOR_PARALLEL}")
            return
    if type(size) is not int or size < 1:
        imported.refuse(key, f"wanted a whole number of at least 1 as {note}, got {size!r}")
    elif size == 1:
        imported.ignore(key, f"{note} is 1")
    else:
        imported.take(key, {"computation.tensor_parallel": size}, note)


def _graphs(imported: Import, key: str, value: Any) -> None:
    folder = imported.beside(str(Path(str(value)).parent / CARD_FILE)).parent
    if imported.is_export:
        names = "NAME_prefill_graph.mindir and NAME_inc_graph.mindir"
        imported.take(key, {"output.out": str(folder)}, f"both graphs are in this folder, as {names}")
    elif any(map(imported.value, ("load_checkpoint", "pretrained_model_dir", "model_path"))):
        imported.ignore(key, "the checkpoint is run; `--decoder FOLDER` would run the graphs of a folder")
    elif (folder / CARD_FILE).is_file():
        _take_exported(imported, key, folder)
    elif str(value).endswith(".mindir"):
        message, hint = foreign_weights(value)
        imported.refuse(key, f"{message}, and its folder has no {CARD_FILE}: {hint}")
    else:
        imported.refuse(key, f"`{value}` is no .mindir file")


def _context_mode(imported: Import, key: str, value: Any) -> None:
    if value == 0 and str(imported.value("context.device_target", "ascend")).lower() != "cpu":
        imported.take(key, {"computation.mode": "graph"}, "the device's first graph mode")
    elif value in (0, 1):
        imported.take(key, {"computation.mode": "eager"}, "a CPU has no graph mode" if value == 0 else "")
    else:
        imported.refuse(key, f"wanted 0 (graph) or 1 (eager), got {value!r}")


def _ge_config(imported: Import, key: str, value: Any) -> None:
    imported.take(key, {"computation.ge_config": str(imported.beside(str(value)))})


# PaddleNLP: options of predictor.py and export_model.py


def _example(imported: Import, key: str, value: Any) -> None:
    if imported.value("data_file") is None:
        prompts = {"prompt.prompt": value, "prompt.raw": True}
        imported.take(key, prompts, "predictor.py's own, because no data_file is named")


def _output_file(imported: Import, key: str, value: Any) -> None:
    records = f"{str(value).removesuffix('.json')}.jsonl"
    note = f"src, tgt and output, written at the end; {records} has the answers before, and continues a run"
    imported.take(key, {"output.paddlenlp_out": str(value), "output.out": records}, note)


def _adapter(imported: Import, key: str, value: Any) -> None:
    if isinstance(value, str) and value.endswith((".pth", ".safetensors")):
        imported.take(key, {"model.adapter": value})
    else:
        imported.take(key, {"computation.past_key_values": value}, "the folder of pre_caches.npy")


def _bits(imported: Import, key: str, value: Any) -> None:
    """a8w8, and ptq_int8, which refuses a model without calibrated scales; other names are of weights alone."""
    if value not in ("a8w8", "ptq_int8"):
        alone = {f"weight_only_{name}": {"computation.precision": name} for name in QUANTISED}
        one_of(alone, otherwise="weights are float, 8-bit or 4-bit here, and the cache is float")(imported, key, value)
        return
    from llama_adapter.app.models.bundle_manifest import INPUT_SCALES  # imports torch

    name = str(imported.value("model_name_or_path"))
    calibrate = f"`llama-adapter quantize --model {shlex.quote(name)} --calibrate PICTURES --out BUNDLE`"
    if (bundle_folder(name) / INPUT_SCALES).is_file():
        imported.take(key, _ROUNDED, "with the scales of the bundle")
    elif value == "a8w8":
        imported.take(key, _ROUNDED, f"each row of inputs gets its own scale; {calibrate} makes scales for all rows")
    else:
        imported.refuse(key, f"`{name}` has no scales of inputs; name the bundle that {calibrate} makes of a float one")


# ModelRunner: `runner_settings`, a YAML of CANN's recipes

_GRAPH_MODES = ("ge_graph", "acl_graph", "npugraph_ex")
_BITS: Mapping[str, Mapping[str, str]] = {
    name: settings
    for names, settings in (
        (("w8a16", "a16w8", "weight_only_int8", "int8"), {"computation.precision": "int8"}),
        (("w4a16", "a16w4", "weight_only_int4", "int4"), {"computation.precision": "int4"}),
        (("w8a8", "a8w8"), _ROUNDED),
        (("w16a16", "a16w16", "none"), {}),
    )
    for name in names
}


def _few_bits(imported: Import, key: str, value: Any) -> None:
    """The bits of weights and inputs, such as W8A16."""
    if isinstance(value, Mapping):
        imported.refuse(
            key,
            "weights that another program quantised cannot be read: name the float model, and give the bits by a name "
            "such as w8a16, or as --precision",
        )
    else:
        name = value.lower() if isinstance(value, str) else value
        one_of(_BITS, otherwise="other numbers of bits are not supported")(imported, key, name)


def _num_ranks(imported: Import) -> Any:
    return imported.value("world_size") or imported.value("parallel_config.world_size") or 1


def _all_ranks(imported: Import, key: str, value: Any) -> None:
    size = _num_ranks(imported)
    if value == size:
        imported.ignore(key, "one is the default" if size == 1 else "computation.tensor_parallel says it")
    else:
        imported.refuse(key, f"{value!r}: heads and feed-forward units are split over all ranks, world_size is {size}")


def _ranks_of_table(imported: Import, key: str, value: Any) -> None:
    if imported.value("world_size") or value == 1:
        _all_ranks(imported, key, value)
    else:
        number("computation.tensor_parallel")(imported, key, value)


# The rules and conditions that foreign_keys.toml names

_FUNCTIONS: list[Rule] = [_run_mode, _prompts, _parallel, _graphs, _ge_config, _context_mode, _do_sample]
_FUNCTIONS += [_drawn, _example, _output_file, _adapter, _bits, _few_bits, _all_ranks, _ranks_of_table]
_RULES: Mapping[str, Rule] = {
    **{function.__name__.removeprefix("_"): function for function in _FUNCTIONS},
    "model": model,
    "dtype": one_of(
        {name: {"computation.dtype": name} for name in ("float32", "bfloat16", "float16")},
        otherwise="other dtypes are not supported",
    ),
    "mode": one_of(
        {mode: {"computation.mode": mode} for mode in ("eager", *_GRAPH_MODES)},
        otherwise="ModelRunner has no other modes",
    ),
}
_CONDITIONS: Mapping[str, Condition] = {
    "greedy": lambda imported, value: not imported.is_sampled,
    "texts only": lambda imported, value: all(one == "text" for one in (value if isinstance(value, list) else [value])),
    "in parallel": lambda imported, value: imported.value("use_parallel") is True,
    "without MindIR": lambda imported, value: imported.setting("computation.decoder_backend") is None,
    "no export": lambda imported, value: not imported.is_export,
    "one": lambda imported, value: value == 1,
    "on": lambda imported, value: value is True,
    "not on": lambda imported, value: value is not True,
    "not off": lambda imported, value: value is not False,
    "one rank": lambda imported, value: _num_ranks(imported) == 1,
    "all of several": lambda imported, value: value == _num_ranks(imported) != 1,
    "one of several": lambda imported, value: value == 1 and _num_ranks(imported) != 1,
    "graph of several ranks": lambda imported, value: value in _GRAPH_MODES and _num_ranks(imported) != 1,
}


def _rules(system: str) -> dict[str, Rule]:
    """The rule of each key of a system, from its tables in foreign_keys.toml."""
    tables: Mapping[str, dict[str, Any]] = defaultdict(dict, _KEYS[system])
    notes = tables["notes"]
    rules = {key: _RULES[name] for name, keys in tables["rules"].items() for key in keys}
    for name_key, index_key in tables["devices"].items():
        rules |= device(name_key, index_key)
    for setting, keys in tables["numbers"].items():
        rules |= {key: number(setting, notes.get(key, "")) for key in keys}
    for key, settings in tables["taken"].items():
        rules[key] = taken(settings, notes.get(key, ""))
    for key, values in tables["values"].items():
        known = values | dict.fromkeys(tables["families"].get(key, ()), _OF_FOLDER)
        rules[key] = one_of(known, otherwise=known.pop("otherwise"))
    for name, rule in (("ignored", ignored), ("refused", refused)):
        for reason, keys in tables[name].items():
            rules |= dict.fromkeys(keys, rule(reason))
    for reason, row in reversed(tables["ignored_if"].items()):  # the conditions of the first are then asked first
        rules |= {key: ignored_if(_any_of(row["if"]), reason, rules[key]) for key in row["keys"]}
    return rules


def _any_of(names: list[str]) -> Condition:
    """Whether a condition of these names holds. A name that is none of `_CONDITIONS` is a key, which has a value."""
    conditions = [_CONDITIONS.get(name) or _has_value(name) for name in names]
    return lambda imported, value: any(holds(imported, value) for holds in conditions)


def _has_value(name: str) -> Condition:
    return lambda imported, value: imported.value(name) not in (None, "")


_RULES_OF = {system: _rules(system) for system in _KEYS}


# The importers


def import_mindformers(data: Mapping[str, Any]) -> Imported:
    """The settings of `generate` for a predict YAML, and those of `export decoder` for `run_mode: export`."""
    imported = Import("MindFormers", data)
    imported.set("command", EXPORT if data.get("run_mode") == "export" else "generate")
    imported.is_sampled = imported.value("generation_config.do_sample", imported.value(f"{_CONFIG}.do_sample")) is True
    # Text options may be in two tables. generation_config has precedence over model_config.
    first = ("load_checkpoint", "infer", "predict_length", "generation_config", "max_length")
    imported.run(_RULES_OF["MindFormers"], first=first)
    if imported.is_export and imported.setting("output.out") is None:
        _RULES_OF["MindFormers"]["output_dir"](imported, "output_dir", "output")
    imported.set("prompt.raw", True)
    _set_sampling(imported)
    return _with_all_new_tokens(imported)


def import_infer_main(data: Mapping[str, Any]) -> Imported:
    """The settings of `generate` for the options of run_infer_main.py, which asks for prompts."""
    imported = Import("MindFormers", data)
    imported.set("command", "generate")
    imported.is_sampled = imported.value("do_sample") is True
    first = ("model_path", "prefill_model_path", "increment_model_path", "max_length")
    imported.run(_RULES_OF["run_infer_main.py"], first=first)
    if not any(imported.value(key) for key in ("model_path", "prefill_model_path")):
        imported.refuse("model_path", "it is missing, and so is prefill_model_path: one of them names what is run")
    if imported.value("predict_data") is None:
        prompts = {"prompt.prompt_file": ["-"], "prompt.raw": True}
        imported.take("stdin", prompts, "each line is a prompt, continued without a template; Ctrl-D ends them")
    _set_sampling(imported)
    imported.set("generation.max_length", 1024)
    return _with_all_new_tokens(imported)


def _with_all_new_tokens(imported: Import) -> Imported:
    """The result, in which only the length of prompt and answer together limits an answer."""
    longest = imported.setting("generation.max_length")
    if longest is not None:
        imported.set("generation.max_new_tokens", longest)
    return imported.done()


def import_paddlenlp(data: Mapping[str, Any]) -> Imported:
    """The settings of `generate` for the predictor's options; with `output_path`, those of `export decoder`.

    Omitted options get PaddleNLP's defaults.
    """
    imported = Import("PaddleNLP", data)
    imported.set("command", EXPORT if "output_path" in data else "generate")
    if not data.get("model_name_or_path"):
        imported.refuse("model_name_or_path", "it is missing, and PaddleNLP has no default")
    # PaddleNLP's defaults: top_k 1, which is greedy; top_p and temperature 1; at most 1024 prompt tokens, 2048 in all.
    imported.is_sampled = imported.value("decode_strategy") != "greedy_search" and imported.value("top_k", 1) != 1
    imported.run(_RULES_OF["PaddleNLP"], first=("model_name_or_path", "quant_type"))
    _set_sampling(imported)
    imported.set("prompt.raw", True)
    imported.set("generation.max_prompt_tokens", 1024)
    imported.set("generation.max_length", 2048)
    return _with_all_new_tokens(imported)


def import_model_runner(data: Mapping[str, Any]) -> Imported:
    """The settings of this package for runner settings. They are of any command."""
    imported = Import("ModelRunner", data)
    imported.is_sampled = imported.value("data_config.do_sample") is True
    imported.run(_RULES_OF["ModelRunner"])
    if any(imported.value(f"data_config.{name}") is not None for name in ("do_sample", *_SAMPLING)):
        _set_sampling(imported)
    return imported.done()


ImportSettings = Callable[[Mapping[str, Any]], Imported]
_RUNNER_KEYS = {"model_name", "world_size", "model_config", "data_config", "parallel_config", "quant_config"}
_MINDFORMERS_KEYS = {"run_mode", "load_checkpoint", "predict_data", "infer", "auto_trans_ckpt", "use_parallel"}


def importer_of(data: Mapping[str, Any]) -> ImportSettings | None:
    """The importer of the system that has these keys; None for no known system."""
    keys = {*data, *(own if isinstance(own := data.get("model_config"), Mapping) else ())}  # or all is in tables
    if "exe_mode" in keys or ("model_path" in keys and _RUNNER_KEYS & data.keys()):
        return import_model_runner
    if "model_name_or_path" in data:
        return import_paddlenlp
    table = data.get("model")
    if _MINDFORMERS_KEYS & data.keys() or (isinstance(table, Mapping) and "model_config" in table):
        return import_mindformers
    return None
