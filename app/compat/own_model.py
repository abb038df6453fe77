"""A model class of the program in the loop of `ModelRunner`: its loading, its inputs, and tokens from its logits."""

# B prompts, S positions, V vocabulary

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.sampler import choose, predict
from llama_adapter.runtime.devices.transfer import upload
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import read_safetensors


def read_config(config: Any, folder: Path) -> Any:
    """`config` itself, or read by `config.from_pretrained`; None means `config.json` as attributes, if there is one."""
    if config is None and (folder / "config.json").is_file():
        return SimpleNamespace(**read_json(folder / "config.json"))
    from_pretrained = getattr(config, "from_pretrained", None) if isinstance(config, type) else None
    return config if from_pretrained is None else from_pretrained(str(folder))


def build(model: Any, config: Any, folder: Path, settings: Mapping[str, Any], *, online: bool) -> Any:
    """A model with the weights of all safetensors by `load_weights` if `online`, else by `from_pretrained`, if any."""
    if hasattr(model, "from_pretrained") and not (online and hasattr(model, "load_weights")):
        return model.from_pretrained(str(folder), runner_settings=settings)
    made = model(config, settings)
    if hasattr(made, "load_weights"):
        files = sorted(folder.glob("*.safetensors"))
        made.load_weights(pair for file in files for pair in read_safetensors(file).items())
    return made


def padded(prompts: Sequence[Sequence[int]], *, width: int, pad_id: int, device: Any) -> SimpleNamespace:
    """`input_ids` and `attention_mask` (B, `width`) of prompts, cut or padded at their end."""
    rows = [(list(ids[:width]), width - len(ids)) for ids in prompts]
    ids_BS = upload([ids + [pad_id] * rest for ids, rest in rows], device)
    mask_BS = upload([[1] * len(ids) + [0] * rest for ids, rest in rows], device)
    return SimpleNamespace(input_ids=ids_BS, attention_mask=mask_BS)


def prepare(model: Any, input_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `forward`, from the model's `prepare_inputs_for_generation`."""
    taken = inspect.signature(model.prepare_inputs_for_generation).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    found = {name: value for name, value in input_dict.items() if takes_all or name in taken}
    return dict(model.prepare_inputs_for_generation(**found))


def advance(
    input_dict: dict[str, Any], model_inputs: Mapping[str, Any], outputs: Any, sampling: SamplingParams, random: Random
) -> list[int]:
    """Choose the next token of each prompt and add it to `input_dict`; returns the tokens.

    The model's output is, or has as `logits`, logits (B, S, V) of all positions or of the last ones.
    """
    mask_BS, logits_BSV = input_dict["attention_mask"], getattr(outputs, "logits", outputs)
    last_B = torch.full_like(mask_BS[:, 0], logits_BSV.shape[1] - 1)
    if logits_BSV.shape[1] == mask_BS.shape[1]:
        last_B -= mask_BS.flip(1).argmax(dim=1)  # padding
    logits_BV = logits_BSV[torch.arange(len(last_B), device=last_B.device), last_B].float()
    drawn = (sampling.temperature, sampling.top_p, sampling.top_k)
    draws = [None if sampling.greedy else Draw(*drawn, random.random()) for _ in logits_BV]
    next_B = choose(predict(logits_BV), draws, upload=lambda numbers: upload(numbers, mask_BS.device))
    ids_BS = torch.cat([input_dict["generate_ids"], next_B[:, None]], dim=1)
    input_dict |= {"input_ids": ids_BS, "generate_ids": ids_BS, "kv_len": mask_BS.sum(dim=1)}
    input_dict["past_key_values"] = getattr(outputs, "past_key_values", model_inputs.get("past_key_values"))
    input_dict["attention_mask"] = torch.cat([mask_BS, torch.ones_like(mask_BS[:, :1])], dim=1)
    input_dict["curr_position"] += 1
    return next_B.tolist()
