"""Converts a YAML of MindFormers, with the `infer` table of MindSpore Lite, to settings of `generate` or an export."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_adapter.app.compat.imported import (
    EXPORT,
    ONLY_TENSOR_PARALLEL,
    Import,
    Imported,
    Rule,
    exported,
    greedy_or_sampled,
    ignored,
    model,
    number,
    one_of,
    whole_number,
)
from llama_adapter.app.models.models_by_name import foreign_weights
from llama_adapter.llm.exported.card import CARD_FILE
from llama_adapter.runtime.device_names import our_device

SYSTEM = "MindFormers"
_OWN_KEYS = {"run_mode", "load_checkpoint", "predict_data", "infer", "auto_trans_ckpt", "use_parallel"}
_CONFIG = "model.model_config"
_SAMPLING = {name: f"{_CONFIG}.{name}" for name in ("temperature", "top_k", "top_p")}
_COMMANDS = {
    "train": "`llama-adapter train` trains adapters",
    "finetune": "`llama-adapter train` trains adapters",
    "eval": "`llama-adapter eval` scores answers",
}


def is_ours(data: Mapping[str, Any]) -> bool:
    """Whether these are settings of MindFormers."""
    table = data.get("model")
    return bool(_OWN_KEYS & data.keys()) or (isinstance(table, Mapping) and "model_config" in table)


def _mode(imported: Import, key: str, value: Any) -> None:
    if value == "predict":
        imported.take(key, {"command": "generate"})
    elif value == "export":
        imported.take(key, {"command": EXPORT, "output.graph_format": "mindir"})
    else:
        command = _COMMANDS.get(str(value), "`llama-adapter --help` lists the commands")
        imported.refuse(key, f"{value!r}: this file becomes settings of `generate`; {command}")


def _prompts(imported: Import, key: str, value: Any) -> None:
    texts = value if isinstance(value, list) else [value]
    if len(texts) == 1 and str(texts[0]).endswith((".txt", ".json", ".jsonl")):
        imported.take(key, {"prompt.prompt_file": [str(texts[0])], "prompt.raw": True})
    elif len(texts) == 1:
        imported.take(key, {"prompt.prompt": str(texts[0]), "prompt.raw": True}, "continued without a template")
    else:
        imported.refuse(key, "several prompts come in a .txt, one on each line")


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
            imported.refuse(key, f"parallel_config.{other} is {parts!r}: {ONLY_TENSOR_PARALLEL}")
            return
    if type(size) is not int or size < 1:
        imported.refuse(key, f"wanted a whole number of at least 1 as {note}, got {size!r}")
    elif size == 1:
        imported.ignore(key, f"{note} is 1")
    else:
        imported.take(key, {"computation.tensor_parallel": size}, note)


def _parallel_table(imported: Import, key: str, value: Any) -> None:
    is_on = imported.value("use_parallel") is True
    imported.ignore(key, "use_parallel reports the part that is used" if is_on else "use_parallel is not on")


def _checkpoint(imported: Import, key: str, value: Any) -> None:
    if imported.value("load_checkpoint"):
        imported.ignore(key, "load_checkpoint names the model")
    else:
        model(imported, key, value)


def _stretched(imported: Import, key: str, value: Any) -> None:
    if str(value) in ("None", "none"):
        imported.ignore(key, "positions are not stretched")
    else:
        imported.refuse(key, f"{value!r}: positions are not stretched here")


def _graphs(imported: Import, key: str, value: Any) -> None:
    folder = imported.beside(str(Path(str(value)).parent / CARD_FILE)).parent
    if imported.is_export:
        names = "NAME_prefill_graph.mindir and NAME_inc_graph.mindir"
        imported.take(key, {"output.out": str(folder)}, f"both graphs are in this folder, as {names}")
    elif imported.value("load_checkpoint") or imported.value("model_path"):
        imported.ignore(key, "the checkpoint is run; `--decoder FOLDER` would run the graphs of a folder")
    elif (folder / CARD_FILE).is_file():
        exported(imported, key, folder)
    elif str(value).endswith(".mindir"):
        message, hint = foreign_weights(value)
        imported.refuse(key, f"{message}, and its folder has no {CARD_FILE}: {hint}")
    else:
        imported.refuse(key, f"`{value}` is no .mindir file")


def _graph_length(imported: Import, key: str, value: Any) -> None:
    if (length := imported.value(f"{_CONFIG}.seq_length")) in (None, value):
        whole_number("model.context")(imported, key, value)
    else:
        imported.ignore(key, f"model.context is {length} already")


def _graph_engine(imported: Import, key: str, value: Any) -> None:
    if imported.setting("computation.decoder_backend") is None:
        imported.ignore(key, "it is for MindIR graphs, and none are run")
    else:
        imported.take(key, {"computation.ge_config": str(imported.beside(str(value)))})


def _device(target: str, index: str) -> dict[str, Rule]:
    """The rules for the keys of a device and its index."""

    def by_name(imported: Import, key: str, value: Any) -> None:
        ours = our_device(str(value), index=imported.value(index, 0))
        if ours is None:
            imported.refuse(key, f"there is no device named {value!r}: wanted Ascend, GPU or CPU")
        else:
            imported.take(key, {"computation.device": ours})

    def by_index(imported: Import, key: str, value: Any) -> None:
        if imported.value(target) is not None:
            imported.ignore(key, "it is part of computation.device")
        elif value == 0:
            imported.ignore(key, "the first device is the default")
        else:
            imported.take(key, {"computation.device": our_device("Ascend", index=value)}, "Ascend is the default there")

    return {target: by_name, index: by_index}


def _output_dir(imported: Import, key: str, value: Any) -> None:
    if imported.is_export:
        imported.take(key, {"output.out": f"{value}/mindir_full_checkpoint"}, "both graphs are in one folder")
    else:
        imported.ignore(key, "answers go to stdout, or to the file that --out names")


def _context_mode(imported: Import, key: str, value: Any) -> None:
    if value == 0 and str(imported.value("context.device_target", "ascend")).lower() != "cpu":
        imported.take(key, {"computation.mode": "graph"}, "the device's first graph mode")
    elif value in (0, 1):
        imported.take(key, {"computation.mode": "eager"}, "a CPU has no graph mode" if value == 0 else "")
    else:
        imported.refuse(key, f"wanted 0 (graph) or 1 (eager), got {value!r}")


def _seed(imported: Import, key: str, value: Any) -> None:
    if imported.value(f"{_CONFIG}.do_sample") is True:
        whole_number("generation.seed", least=0)(imported, key, value)
    else:
        imported.ignore(key, "the most probable token is taken")


def _batch_size(imported: Import, key: str, value: Any) -> None:
    if imported.value("predict_batch_size") is None:
        whole_number("computation.batch_size")(imported, key, value)
    else:
        imported.ignore(key, "predict_batch_size has precedence")


def _sampling_in_graphs(imported: Import, key: str, value: Any) -> None:
    if imported.is_export and value is False:
        imported.take(key, {"output.without_sampling": True})
    else:
        imported.ignore(key, "tokens are chosen on the device, unless graphs were exported without sampling")


_FROM_CHECKPOINT = ignored("the checkpoint determines it")
_TRAINING = ignored("it is for training")

RULES: dict[str, Rule] = {
    "run_mode": _mode,
    "load_checkpoint": model,
    "use_parallel": _parallel,
    "auto_trans_ckpt": ignored("checkpoints are not split"),
    "src_strategy_path_or_dir": ignored("checkpoints are not split"),
    "worker_num": ignored("use_parallel says whether the devices share the model"),
    "output_dir": _output_dir,
    "predict_data": _prompts,
    "predict_batch_size": whole_number("computation.batch_size"),
    "predict_length": whole_number("generation.max_length"),
    "seed": _seed,
    "trainer": ignored("it names the task and the model, which other keys give"),
    f"{_CONFIG}.type": one_of({"LlamaConfig": {}}, otherwise="this program runs LLaMA"),
    f"{_CONFIG}.batch_size": _batch_size,
    f"{_CONFIG}.seq_length": whole_number("model.context"),
    f"{_CONFIG}.max_decode_length": whole_number("generation.max_length"),
    f"{_CONFIG}.max_length": whole_number("generation.max_length"),
    f"{_CONFIG}.max_new_tokens": whole_number("generation.max_new_tokens"),
    f"{_CONFIG}.repetition_penalty": number("generation.repetition_penalty"),
    f"{_CONFIG}.do_sample": lambda imported, key, value: None,  # converted together with others, below
    f"{_CONFIG}.top_k": lambda imported, key, value: None,
    f"{_CONFIG}.top_p": lambda imported, key, value: None,
    f"{_CONFIG}.temperature": lambda imported, key, value: None,
    f"{_CONFIG}.compute_dtype": one_of(
        {name: {"computation.dtype": name} for name in ("float32", "bfloat16", "float16")},
        otherwise="other dtypes are not supported",
    ),
    f"{_CONFIG}.use_past": ignored("answers are always made token by token, from a cache"),
    f"{_CONFIG}.checkpoint_name_or_path": _checkpoint,
    f"{_CONFIG}.is_sample_acceleration": _sampling_in_graphs,
    **{
        f"{_CONFIG}.{name}": _FROM_CHECKPOINT
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "n_kv_heads",
            "vocab_size",
            "multiple_of",
            "rms_norm_eps",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "theta",
        )
    },
    f"{_CONFIG}.extend_method": _stretched,
    f"{_CONFIG}.pet_config": lambda imported, key, value: imported.refuse(
        key,
        "take it out, and name the folder of the fine-tuning's .ckpt and YAML as --lora, beside the base model; the "
        "file of a LLaMA-Adapter is model.adapter",
    ),
    "model.arch.type": one_of({"LlamaForCausalLM": {}}, otherwise="this program runs LLaMA"),
    "infer.prefill_model_path": _graphs,
    "infer.increment_model_path": _graphs,
    "infer.infer_seq_length": _graph_length,
    "infer.model_type": ignored("it is the form of the MindIR graphs"),
    "infer.ge_config_path": _graph_engine,
    "context.mode": _context_mode,
    **_device("context.device_target", "context.device_id"),
    "parallel_config": _parallel_table,
    "parallel": _parallel_table,
    "processor": ignored("the model's own tokenizer is used"),
    **dict.fromkeys(
        (
            *("train_dataset", "train_dataset_task", "eval_dataset", "eval_dataset_task", "do_eval", "runner_config"),
            *(
                "optimizer",
                "lr_schedule",
                "callbacks",
                "eval_callbacks",
                "recompute_config",
                "runner_wrapper",
                "metric",
            ),
            *("resume_training", "micro_batch_interleave_num", "layer_scale", "layer_decay", "lr_scale_factor"),
        ),
        _TRAINING,
    ),
}


_INFER_RULES: dict[str, Rule] = {  # options of run_infer_main.py
    "model_path": model,
    "prefill_model_path": _graphs,
    "increment_model_path": _graphs,
    "config_path": _graph_engine,
    **_device("device", "device_id"),
    "model_name": one_of({"llama": {}, "llama2": {}, "common": {}}, otherwise="this program runs LLaMA"),
    "tokenizer_path": ignored("the model's own tokenizer is used"),
    "seq_length": whole_number("generation.max_length", note="of prompt and answer together"),
    "is_sample_acceleration": _sampling_in_graphs,
    "add_special_tokens": one_of(
        {True: {}}, otherwise="a prompt gets the begin token; `pipeline(..., add_special_tokens=False)` leaves it out"
    ),
    "stream": ignored("an answer is printed when it is complete; that of --prompt, on a terminal, as it is generated"),
}


def import_settings(data: Mapping[str, Any]) -> Imported:
    """The settings of `generate` for a predict YAML, and those of `export decoder` for `run_mode: export`."""
    imported = Import(SYSTEM, data)
    imported.set("command", EXPORT if data.get("run_mode") == "export" else "generate")
    imported.run(RULES, first=("load_checkpoint", "infer"))
    if imported.is_export and imported.setting("output.out") is None:
        _output_dir(imported, "output_dir", "output")
    imported.set("prompt.raw", True)
    switch = f"{_CONFIG}.do_sample"
    greedy_or_sampled(imported, is_sampled=imported.value(switch) is True, paths=_SAMPLING, switch=switch)
    return _with_all_new_tokens(imported)


def import_infer_main(data: Mapping[str, Any]) -> Imported:
    """The settings of `generate` for the options of run_infer_main.py, which asks for prompts."""
    imported = Import(SYSTEM, data)
    imported.set("command", "generate")
    imported.run(_INFER_RULES, first=("model_path", "prefill_model_path", "increment_model_path"))
    if not any(imported.value(key) for key in ("model_path", "prefill_model_path")):
        imported.refuse("model_path", "it is missing, and so is prefill_model_path: one of them names what is run")
    prompts = {"prompt.prompt_file": ["-"], "prompt.raw": True}
    imported.take("stdin", prompts, "each line is a prompt, continued without a template; Ctrl-D ends them")
    imported.set("generation.temperature", 0.0)
    imported.set("generation.max_length", 1024)
    return _with_all_new_tokens(imported)


def _with_all_new_tokens(imported: Import) -> Imported:
    """The result, in which only the length of prompt and answer together limits an answer."""
    longest = imported.setting("generation.max_length")
    if longest is not None:
        imported.set("generation.max_new_tokens", longest)
    return imported.done()
