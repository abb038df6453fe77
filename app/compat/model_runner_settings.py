"""Converts ModelRunner's `runner_settings`, a YAML of CANN's recipes, to settings for any command."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.compat.imported import (
    Import,
    Imported,
    Rule,
    at_most_one,
    few_bits,
    greedy_or_sampled,
    ignored,
    model,
    one_of,
    whole_number,
)

SYSTEM = "ModelRunner"
_SAMPLING = {name: f"data_config.{name}" for name in ("temperature", "top_k", "top_p")}
_SWITCH = "data_config.do_sample"
_OTHERS = {"model_name", "world_size", "model_config", "data_config", "parallel_config", "quant_config"}


def is_ours(data: Mapping[str, Any]) -> bool:
    """Whether these are runner settings."""
    return "exe_mode" in data or ("model_path" in data and bool(_OTHERS & data.keys()))


_MODES = one_of(
    {mode: {"computation.mode": mode} for mode in ("eager", "ge_graph", "acl_graph", "npugraph_ex")},
    otherwise="ModelRunner has no other modes",
)


def _mode(imported: Import, key: str, value: Any) -> None:
    if value in ("ge_graph", "acl_graph", "npugraph_ex") and imported.value("world_size", 1) != 1:
        imported.ignore(key, "several ranks run operator by operator: no graph holds the sums over them")
    else:
        _MODES(imported, key, value)


def _profiler(imported: Import, key: str, value: Any) -> None:
    if value is True:
        imported.take(key, {"profiling.trace": "prof"}, "its folder, as there")
    else:
        imported.ignore(key, "no profiler is the default")


def _split_weights(imported: Import, key: str, value: Any) -> None:
    if imported.value("world_size", 1) == 1:
        imported.ignore(key, "one device holds all weights")
    elif value is True:
        imported.ignore(key, "each rank reads its own part of the weights")
    else:
        imported.refuse(key, "weights that were split offline, in rank_N folders, cannot be read: name the whole model")


def _world_size(imported: Import, key: str, value: Any) -> None:
    if value == 1:
        imported.ignore(key, "one is the default")
    else:
        whole_number("computation.tensor_parallel")(imported, key, value)


def _all_ranks(imported: Import, key: str, value: Any) -> None:
    size = imported.value("world_size", 1)
    if value == size:
        imported.ignore(key, "one is the default" if size == 1 else "computation.tensor_parallel says it")
    else:
        imported.refuse(key, f"{value!r}: heads and feed-forward units are split over all ranks, world_size is {size}")


def _one_or_all_ranks(imported: Import, key: str, value: Any) -> None:
    if value == 1 and imported.value("world_size", 1) > 1:
        imported.ignore(key, "it is split over all ranks, as attention is")
    else:
        _all_ranks(imported, key, value)


def _checkpoint(imported: Import, key: str, value: Any) -> None:
    if value is True:
        imported.ignore(key, "loading the checkpoint is the default")
    else:
        imported.refuse(key, "a model without weights is what `llama-adapter bench` measures")


RULES: dict[str, Rule] = {
    "model_name": ignored("it names nothing here: records have the name of the model's folder"),
    "model_path": model,
    "exe_mode": _mode,
    "world_size": _world_size,
    "model_config.enable_profiler": _profiler,
    "model_config.enable_online_split_weight": _split_weights,
    "model_config.with_ckpt": _checkpoint,
    "model_config.dtype": one_of(
        {name: {"computation.dtype": name} for name in ("float32", "bfloat16", "float16")},
        otherwise="other dtypes are not supported",
    ),
    "quant_config": few_bits,
    "model_config.quant_config": few_bits,
    "model_config.mm_quant_mode": few_bits,
    "model_config.tokenizer_mode": ignored("prompts go into the model's template; `generate --raw` continues them"),
    "model_config.enable_weight_nz": ignored("the device decides how weights lie in memory (computation.operators)"),
    "model_config.enable_cache_compile": ignored("compiled steps are kept while the program runs"),
    "data_config.input_max_len": whole_number(
        "generation.max_prompt_tokens",
        note="a longer prompt loses its beginning, not its end as there, and its record says how many tokens",
    ),
    "data_config.max_new_tokens": whole_number("generation.max_new_tokens"),
    "data_config.seed": whole_number("generation.seed", least=0),
    **dict.fromkeys((_SWITCH, *_SAMPLING.values()), lambda imported, key, value: None),  # converted together, below
    "data_config.batch_size": whole_number("computation.batch_size"),
    "data_config.max_position_embeddings": ignored("`model.context` limits prompt and answer together"),
    "data_config.dataset": one_of({"default": {}}, otherwise="prompts and pictures are given to the command"),
    "parallel_config.attn_tp_size": _all_ranks,
    "parallel_config.lmhead_tp_size": _one_or_all_ranks,
    "parallel_config.embed_tp_size": _one_or_all_ranks,
    "parallel_config.moe_tp_size": at_most_one("the model has no experts to divide"),
}


def import_settings(data: Mapping[str, Any]) -> Imported:
    """The settings of this package for runner settings."""
    imported = Import(SYSTEM, data)
    imported.run(RULES)
    if any(imported.value(path) is not None for path in (_SWITCH, *_SAMPLING.values())):
        greedy_or_sampled(imported, is_sampled=imported.value(_SWITCH) is True, paths=_SAMPLING, switch=_SWITCH)
    return imported.done()
