"""A model class of the program in the loop of `ModelRunner`: its loading, its inputs, and tokens from its logits."""

# B prompts, S positions, V vocabulary

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.sampler import choose, predict
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import read_safetensors


def read_config(config: Any, path: str | None) -> Any:
    """A configuration: `config` itself, or read from the folder by its class. None: its `config.json`, if it has one."""
    file = Path(path or "") / "config.json"
    if config is None:
        return SimpleNamespace(**read_json(file)) if path is not None and file.is_file() else None
    return config.from_pretrained(path) if isinstance(config, type) and hasattr(config, "from_pretrained") else config


def build(model: Any, config: Any, path: str | None, settings: Mapping[str, Any], *, online: bool) -> Any:
    """A model with its weights: from `from_pretrained`, or if `online` from `load_weights`, where the class has them.

    `load_weights` gets pairs (name, tensor) of all safetensors in the folder.
    """
    if hasattr(model, "from_pretrained") and not (online and hasattr(model, "load_weights")):
        return model.from_pretrained(path, runner_settings=settings)
    made = model(config, settings)
    if hasattr(made, "load_weights"):
        files = sorted(Path(path or "").glob("*.safetensors"))
        made.load_weights(pair for file in files for pair in read_safetensors(file).items())
    return made


def padded(prompts: Sequence[Sequence[int]], *, width: int, pad_id: int, device: Any) -> SimpleNamespace:
    """`input_ids` and `attention_mask` (B, S) of prompts, which lose what exceeds the width; padding is at the right."""
    rows = [[*ids[:width]] for ids in prompts]
    ids_BS = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], device=device)
    lengths_B = torch.tensor([len(row) for row in rows], device=device)
    mask_BS = (torch.arange(width, device=device) < lengths_B[:, None]).long()
    return SimpleNamespace(input_ids=ids_BS, attention_mask=mask_BS)


def first_inputs(inputs: Any) -> dict[str, Any]:
    """The `input_dict` before the first step."""
    unset = dict.fromkeys(("past_key_values", "position_ids", "kv_len", "cache_position"))
    given = {"input_ids": inputs.input_ids, "generate_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    return {**given, **unset, "is_prefill": True, "curr_position": inputs.input_ids.shape[1] - 1}


def prepare(model: Any, input_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `forward`: the result of the model's `prepare_inputs_for_generation`, or the token ids."""
    if not hasattr(model, "prepare_inputs_for_generation"):
        return {"input_ids": input_dict["input_ids"]}
    taken = inspect.signature(model.prepare_inputs_for_generation).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    found = {name: value for name, value in input_dict.items() if takes_all or name in taken}
    return dict(model.prepare_inputs_for_generation(**found))


def next_tokens(outputs: Any, mask_BS: Tensor, sampling: SamplingParams, random: Random) -> Tensor:
    """The next token of each prompt (B,), from logits (B, S, V) of all positions or of the last one only."""
    logits_BSV = getattr(outputs, "logits", outputs)
    if logits_BSV.shape[1] == mask_BS.shape[1]:
        last_B = mask_BS.shape[1] - 1 - mask_BS.flip(1).argmax(dim=1)
        logits_BV = logits_BSV[torch.arange(len(last_B), device=last_B.device), last_B]
    else:
        logits_BV = logits_BSV[:, -1]
    drawn = (sampling.temperature, sampling.top_p, sampling.top_k)
    draws = [None if sampling.greedy else Draw(*drawn, random.random()) for _ in logits_BV]
    return choose(
        predict(logits_BV.float()), draws, upload=lambda numbers: torch.tensor(numbers, device=mask_BS.device)
    )


def advance(input_dict: dict[str, Any], next_B: Tensor, model_inputs: Mapping[str, Any], outputs: Any) -> None:
    """Add new tokens to `input_dict`: all ids so far, their mask, the cache and how many tokens it has."""
    mask_BS = input_dict["attention_mask"]
    cache = getattr(outputs, "past_key_values", None)
    input_dict["past_key_values"] = model_inputs.get("past_key_values") if cache is None else cache
    input_dict["kv_len"] = mask_BS.sum(dim=1)
    input_dict["generate_ids"] = torch.cat([input_dict["generate_ids"], next_B[:, None]], dim=1)
    input_dict["input_ids"] = input_dict["generate_ids"]
    input_dict["attention_mask"] = torch.cat([mask_BS, torch.ones_like(next_B)[:, None]], dim=1)
    input_dict["curr_position"] += 1
