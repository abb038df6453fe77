"""LoRA folders of MindFormers and PaddleNLP, turned into the config and names of PEFT."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from llama_adapter.llm.weights.mindspore import meta_name, only_file, read_model_config
from llama_adapter.llm.weights.peft_config import PeftConfig, made_config
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.tensor_files.ckpt_files import read_ckpt
from llama_adapter.runtime.tensor_files.files import Shape, read_tensor_file
from llama_adapter.runtime.tensor_files.paddle_files import read_pdparams
from llama_adapter.runtime.text import shown_excerpt

_PADDLE_CONFIG: Final = "lora_config.json"
_PADDLE_WEIGHTS: Final = "lora_model_state.pdparams"
_MINDSPORE_FACTOR: Final = re.compile(r"(.+)\.mindpet_delta_lora_([ab])")
# Behind the name of the decoder in its class. Towers and MTP layers have others.
_DECODERS: Final = r"(?:model\.)?(?:(?:llama|mistral|gemma|qwen2|qwen3)\.)?"
_PADDLE_FACTOR: Final = re.compile(rf"{_DECODERS}(lm_head|(?:layers|embed_tokens)\b.*)\.lora_([AB])")


class Factors(NamedTuple):
    """The low-rank factors of a folder: `model.layers.0.self_attn.q_proj.lora_A` is (rank, inputs)."""

    config: PeftConfig
    files: tuple[Path, ...]
    tensors: Mapping[str, Tensor]


def read_neighbour_lora(folder: Path, known: Mapping[str, tuple[str, Shape]]) -> Factors | None:
    """The LoRA of a folder that MindFormers or PaddleNLP wrote; None for any other folder.

    PaddleNLP writes `lora_config.json` and `lora_model_state.pdparams`, or `peft_model*.safetensors` if its checkpoints
    are unified; matrices are (inputs, rank) and (rank, outputs). MindFormers' fine-tuning writes a `.ckpt` with
    `mindpet_delta_lora_a` (rank, inputs) and `_b` (outputs, rank), beside a YAML whose `pet_config` has `lora_rank` and
    `lora_alpha`. The config targets the modules that have factors and are `known`, with Meta's names and shapes.

    Raises CheckpointError for folders that are damaged, or whose LoRA is computed in another way.
    """
    if (folder / _PADDLE_CONFIG).is_file():
        return _paddle(folder, known)
    if any(folder.glob("*.ckpt")):
        return _mindformers(folder, known)
    return None


def _paddle(folder: Path, known: Collection[str]) -> Factors:
    path = folder / _PADDLE_CONFIG
    files = sorted(folder.glob("peft_model*.safetensors")) or [folder / _PADDLE_WEIGHTS]
    names, count = [one.name for one in files], len(files)
    shards = [f"peft_model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if names not in (shards, ["peft_model.safetensors"], [_PADDLE_WEIGHTS]):
        raise CheckpointError(
            f"`{folder}` has {list_keys(names)}: shards are missing, or they are of several checkpoints",
            hint="copy the whole folder of one checkpoint again",
        )
    config = read_json(path)
    if others := [name for name in ("trainable_bias", "lora_use_mixer", "do_qat", "pissa") if config.get(name)]:
        raise CheckpointError(
            f"`{path}` sets {list_keys(others)}, which is not supported", hint="merge it with `merge_lora_params.py`"
        )
    tensors = {}
    stored = [read_pdparams(one) if one.suffix == ".pdparams" else read_tensor_file(one).tensors for one in files]
    for name, tensor in (pair for shard in stored for pair in shard.items()):
        match = _PADDLE_FACTOR.fullmatch(name)
        module = name if match is None else match[1] if match[1] == "lm_head" else f"model.{match[1]}"
        key = name if match is None else f"{module}.lora_{match[2]}"
        if key in tensors:
            raise CheckpointError(f"`{folder}` has `{shown_excerpt(name)}` twice", hint="copy the whole folder again")
        tensors[key] = tensor.transpose(0, -1)
    scale = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha"), "use_rslora": bool(config.get("rslora"))}
    return _factors(path, files, tensors, known, **scale)


def _mindformers(folder: Path, known: Mapping[str, tuple[str, Shape]]) -> Factors:
    weights, path = only_file(folder, "*.ckpt"), only_file(folder, "*.y*ml")
    config = read_model_config(path).get("pet_config")
    if not isinstance(config, dict) or config.get("pet_type", "lora") != "lora":
        raise CheckpointError(
            f"`{path}` has no `pet_config` of type lora in `model.model_config`, so the scale of its LoRA is unknown",
            hint="use the YAML of the fine-tuning",
        )
    modules = {meta: module for module, (meta, _) in known.items()}
    tensors = {}
    for name, tensor in read_ckpt(weights).items():
        if match := _MINDSPORE_FACTOR.fullmatch(name):  # the others are the base model's, which is a --llama-dir
            module = modules.get(meta_name(f"{match[1]}.weight"), match[1])
            tensors[f"{module}.lora_{match[2].upper()}"] = tensor
    return _factors(path, [weights], tensors, known, r=config.get("lora_rank"), lora_alpha=config.get("lora_alpha"))


def _factors(
    path: Path, files: list[Path], tensors: dict[str, Tensor], known: Collection[str], **scale: Any
) -> Factors:
    modules = {name.rpartition(".")[0] for name in tensors}
    if not modules:
        raise CheckpointError(f"`{files[0]}` has no factors of a LoRA", hint="a whole model is a --llama-dir")
    config = made_config(path, **scale, target_modules=sorted(modules.intersection(known)))
    return Factors(config, (path, *files), tensors)
