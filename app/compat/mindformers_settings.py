"""Converts a predict YAML of MindFormers, with the `infer` table of MindSpore Lite, to settings of `generate`."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.compat.imported import (
    ONLY_TENSOR_PARALLEL,
    Import,
    Imported,
    Rule,
    greedy_or_sampled,
    ignored,
    model,
    number,
    one_of,
    whole_number,
)
from llama_adapter.app.models.models_by_name import foreign_weights
from llama_adapter.runtime.device_names import our_device

SYSTEM = "MindFormers"
_OWN_KEYS = {"run_mode", "load_checkpoint", "predict_data", "infer", "auto_trans_ckpt", "use_parallel"}
_CONFIG = "model.model_config"
_SAMPLING = {name: f"{_CONFIG}.{name}" for name in ("temperature", "top_k", "top_p")}
_COMMANDS = {
    "export": "`llama-adapter export decoder --format mindir --model BUNDLE --out FOLDER` (or --llama-dir) exports",
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
    for other in ("data_parallel", "pipeline_stage"):
        if (parts := imported.value(f"parallel_config.{other}", 1)) != 1:
            imported.refuse(key, f"parallel_config.{other} is {parts!r}: {ONLY_TENSOR_PARALLEL}")
            return
    size = imported.value("parallel_config.model_parallel", 1)
    if type(size) is not int or size < 1:
        imported.refuse(key, f"wanted a whole number of at least 1 as parallel_config.model_parallel, got {size!r}")
    elif size == 1:
        imported.ignore(key, "parallel_config.model_parallel is 1")
    else:
        imported.take(key, {"computation.tensor_parallel": size}, "parallel_config.model_parallel")


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
    if imported.value("load_checkpoint"):
        imported.ignore(key, "load_checkpoint is run; `--decoder FOLDER` would run the graphs of a folder")
    elif str(value).endswith(".mindir"):
        imported.refuse(key, f"{': '.join(foreign_weights(value))}; load_checkpoint names a checkpoint")
    else:
        imported.refuse(key, f"`{value}` is no .mindir file")


def _device(imported: Import, key: str, value: Any) -> None:
    ours = our_device(str(value), index=imported.value("context.device_id", 0))
    if ours is None:
        imported.refuse(key, f"there is no device named {value!r}: wanted Ascend, GPU or CPU")
    else:
        imported.take(key, {"computation.device": ours})


def _device_index(imported: Import, key: str, value: Any) -> None:
    if imported.value("context.device_target") is None:
        imported.take(key, {"computation.device": our_device("Ascend", index=value)}, "Ascend is the default there")
    else:
        imported.ignore(key, "it is part of computation.device")


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


_FROM_CHECKPOINT = ignored("the checkpoint determines it")
_TRAINING = ignored("it is for training")

RULES: dict[str, Rule] = {
    "run_mode": _mode,
    "load_checkpoint": model,
    "use_parallel": _parallel,
    "auto_trans_ckpt": ignored("checkpoints are not split"),
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
    f"{_CONFIG}.is_sample_acceleration": ignored("tokens are always chosen on the device"),
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
        "LoRA of MindFormers is not read: merge it into the checkpoint there, or save its factors as a folder of "
        "Hugging Face PEFT, which --lora reads; the file of a LLaMA-Adapter is model.adapter",
    ),
    "model.arch.type": one_of({"LlamaForCausalLM": {}}, otherwise="this program runs LLaMA"),
    "infer.prefill_model_path": _graphs,
    "infer.increment_model_path": _graphs,
    "infer.infer_seq_length": whole_number("model.context"),
    "infer.model_type": ignored("it is the form of the MindIR graphs"),
    "infer.ge_config_path": ignored("options of the graph engine; `computation.mode` chooses the graphs of a device"),
    "context.mode": _context_mode,
    "context.device_target": _device,
    "context.device_id": _device_index,
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


def import_settings(data: Mapping[str, Any]) -> Imported:
    """The settings of `generate` for a predict YAML."""
    imported = Import(SYSTEM, data)
    imported.run(RULES)
    imported.set("command", "generate")
    imported.set("prompt.raw", True)
    switch = f"{_CONFIG}.do_sample"
    greedy_or_sampled(imported, is_sampled=imported.value(switch) is True, paths=_SAMPLING, switch=switch)
    longest = imported.setting("generation.max_length")
    if longest is not None:
        imported.set("generation.max_new_tokens", longest)
    return imported.done()
