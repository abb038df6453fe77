"""Opens models of families that the package transformers computes. No code of their folders is run."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from llama_adapter.llm.weights.families import FOREIGN, MEANING, check_floats, code_error
from llama_adapter.runtime.errors import CheckpointError, UsageError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.text import one_line, shown_excerpt

_MXFP4 = "mxfp4"  # the 4-bit weights that gpt_oss is published with


def read_foreign(folder: Path) -> Any:
    """The configuration of a foreign model, as transformers reads it.

    Raises UsageError without transformers, and CheckpointError for a configuration that transformers refuses or that
    needs code of its folder, and for quantised weights other than gpt_oss's own.
    """
    entries = read_json(folder / "config.json")
    if "auto_map" in entries:
        raise code_error(folder)
    if (folder / "adapter_config.json").exists():  # transformers would open the model that this file names
        raise CheckpointError(f"`{folder}` holds a model and an adapter of PEFT", hint="move adapter_config.json away")
    if _method(entries) != _MXFP4:
        check_floats(entries, folder=folder)
    transformers = _transformers()
    with _explained(folder):
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def count_weights(config: Any) -> int:
    """The number of weights of a model with this configuration."""
    with torch.device("meta"):
        model = _transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return int(model.num_parameters())


def open_foreign(folder: Path, config: Any, *, dtype: torch.dtype) -> Any:
    """The model of a folder on the CPU, ready for inference. `config` comes from `read_foreign`.

    Weights are read as data, from safetensors or by `torch.load` with `weights_only`. 4-bit weights of gpt_oss become
    `dtype`. Raises CheckpointError for missing weights, and for what transformers cannot read.
    """
    transformers = _transformers()
    options: dict[str, Any] = {}
    if _method(config.to_dict()) == _MXFP4:
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    logging = transformers.utils.logging
    with _explained(folder), ExitStack() as stack:
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            stack.callback(logging.enable_progress_bar)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)  # for tables of positions, which GPT-J computes
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            weights_only=True,
            output_loading_info=True,
            **options,
        )
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"The weights in `{folder}` lack {list_keys(missing)}",
            hint=MEANING,
        )
    return model.eval().requires_grad_(False)


def _method(config: Mapping[str, Any]) -> object:
    quantised = config.get("quantization_config")
    return quantised.get("quant_method") if isinstance(quantised, Mapping) else None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"Models of the types {', '.join(FOREIGN)} run through the package transformers: {error}",
            hint=install_hint("transformers"),
        ) from None
    return transformers


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn errors of transformers about a folder into CheckpointError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot open `{folder}`: {shown_excerpt(one_line(str(error)))}",
            hint="the folder is incomplete or damaged, or needs a newer release of transformers",
        ) from error
