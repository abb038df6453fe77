"""Converts options of PaddleNLP's predictor.py to settings of `generate`, and of export_model.py to an export.

Omitted options get PaddleNLP's defaults.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from llama_adapter.app.compat.imported import (
    EXPORT,
    ROUNDED,
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
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.runtime.device_names import our_device
from llama_adapter.runtime.schemes import QUANTISED

SYSTEM = "PaddleNLP"
_SAMPLING = {"top_k": "top_k", "top_p": "top_p", "temperature": "temperature"}
EXAMPLE = "hello world, how are you?"  # of predictor.py, which asks it if no data_file is named


def is_ours(data: Mapping[str, Any]) -> bool:
    """Whether these are options of predictor.py or export_model.py."""
    return "model_name_or_path" in data


def _text_file(imported: Import, key: str, value: Any) -> None:
    imported.take(
        key, {"prompt.prompt_file": [str(value)], "prompt.raw": True}, "`src` of each line, without a template"
    )


def _example(imported: Import, key: str, value: Any) -> None:
    if imported.value("data_file") is None:
        prompts = {"prompt.prompt": value, "prompt.raw": True}
        imported.take(key, prompts, "predictor.py's own, because no data_file is named")


def _output(imported: Import, key: str, value: Any) -> None:
    records = f"{str(value).removesuffix('.json')}.jsonl"
    note = f"src, tgt and output, written at the end; {records} has the answers before, and continues a run"
    imported.take(key, {"output.paddlenlp_out": str(value), "output.out": records}, note)


def _lora(imported: Import, key: str, value: Any) -> None:
    imported.take(key, {"model.lora": [str(value)]}, "merged when the model is loaded")


def _adapter(imported: Import, key: str, value: Any) -> None:
    if isinstance(value, str) and value.endswith((".pth", ".safetensors")):
        imported.take(key, {"model.adapter": value})
    else:
        imported.take(key, {"computation.past_key_values": value}, "the folder of pre_caches.npy")


def _device(imported: Import, key: str, value: Any) -> None:
    ours = our_device(str(value))
    if ours is None:
        imported.refuse(key, f"there is no device named {value!r}")
    else:
        imported.take(key, {"computation.device": ours})


def _mode(imported: Import, key: str, value: Any) -> None:
    modes = {"dynamic": "eager", "static": "graph"}
    rule = one_of({name: {"computation.mode": mode} for name, mode in modes.items()}, otherwise="there is no third")
    rule(imported, key, value)


_BITS = one_of(
    {f"weight_only_{name}": {"computation.precision": name} for name in QUANTISED},
    otherwise="weights are float, 8-bit or 4-bit here, and the cache is float",
)


def _bits(imported: Import, key: str, value: Any) -> None:
    """a8w8, and ptq_int8, which refuses a model without calibrated scales; other names are of weights alone."""
    if value not in ("a8w8", "ptq_int8"):
        _BITS(imported, key, value)
        return
    from llama_adapter.app.models.bundle_manifest import INPUT_SCALES  # imports torch

    name = str(imported.value("model_name_or_path"))
    calibrate = f"`llama-adapter quantize --model {shlex.quote(name)} --calibrate PICTURES --out BUNDLE`"
    if (bundle_folder(name) / INPUT_SCALES).is_file():
        imported.take(key, ROUNDED, "with the scales of the bundle")
    elif value == "a8w8":
        imported.take(key, ROUNDED, f"each row of inputs gets its own scale; {calibrate} makes scales for all rows")
    else:
        imported.refuse(key, f"`{name}` has no scales of inputs; name the bundle that {calibrate} makes of a float one")


RULES: dict[str, Rule] = {
    "model_name_or_path": model,
    "batch_size": whole_number("computation.batch_size"),
    "src_length": whole_number(
        "generation.max_prompt_tokens", note="a longer prompt loses its beginning, and its record says how many tokens"
    ),
    "max_length": whole_number("generation.max_length", note="of prompt and answer together, as the guide says"),
    "lora_path": _lora,
    "prefix_path": _adapter,
    "export_precache": ignored("`prefix_path` says whether there are any"),
    "top_k": lambda imported, key, value: None,  # converted together with others, below
    "top_p": lambda imported, key, value: None,
    "temperature": lambda imported, key, value: None,
    "repetition_penalty": number("generation.repetition_penalty"),
    "decode_strategy": one_of({"sampling": {}, "greedy_search": {}}, otherwise="beam search is not supported"),
    "data_file": _text_file,
    "output_file": _output,
    "device": _device,
    "dtype": one_of(
        {name: {"computation.dtype": name} for name in ("float32", "bfloat16", "float16")},
        otherwise="other dtypes are not supported",
    ),
    "mode": _mode,
    "quant_type": _bits,
    "cachekv_int8_type": lambda imported, key, value: imported.refuse(key, "keys and values are not kept in 8 bits"),
    "output_path": lambda imported, key, value: imported.take(key, {"output.out": str(value)}),
    "example": _example,
    "inference_model": ignored("there is one implementation, for inference"),
    "model_type": one_of({"llama": {}, "None": {}}, otherwise="this program runs LLaMA"),
    "model_prefix": ignored("the checkpoint determines it"),
    "chat_template": ignored("`prompt` uses the adapters' template, raw text none"),
    "use_flash_attention": ignored("the device decides (computation.operators)"),
    "block_attn": ignored("the device decides (computation.operators)"),
    "benchmark": ignored("`llama-adapter bench` measures"),
}


def import_settings(data: Mapping[str, Any]) -> Imported:
    """The settings of `generate` for the predictor's options; with `output_path`, those of `export decoder`."""
    imported = Import(SYSTEM, data)
    imported.set("command", EXPORT if "output_path" in data else "generate")
    if not data.get("model_name_or_path"):
        imported.refuse("model_name_or_path", "it is missing, and PaddleNLP has no default")
    imported.run(RULES, first=("model_name_or_path", "quant_type"))
    # PaddleNLP's defaults: top_k 1, which is greedy; top_p and temperature 1; at most 1024 prompt tokens, 2048 in all.
    is_greedy = imported.value("decode_strategy") == "greedy_search" or imported.value("top_k", 1) == 1
    greedy_or_sampled(imported, is_sampled=not is_greedy, paths=_SAMPLING)
    imported.set("prompt.raw", True)
    imported.set("generation.max_prompt_tokens", 1024)
    imported.set("generation.max_length", 2048)
    imported.set("generation.max_new_tokens", imported.value("max_length", 2048))
    return imported.done()
