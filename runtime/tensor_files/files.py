"""Reads tensor files of every kind as memory-mapped tensors, and checks their content: kinds, names and shapes.

Damaged and foreign files are refused with an explanation. `llm.weights` and `vision.weights` interpret the tensors.
"""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_adapter.runtime.device_failures import tells_shortage
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import damaged, list_keys, open_safetensors, require_file
from llama_adapter.runtime.tensor_files.pickles import ForeignObjectError, Module, PickleError, TensorHeader, Unread
from llama_adapter.runtime.tensor_files.torch_files import TorchFile, module_tensors
from llama_adapter.runtime.text import shown_excerpt

_LARGEST = 1 << 63  # whole numbers in a tensor are below this
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ADAPTER = "a LLaMA-Adapter file"
# A pattern of keys, and the kind of file that has such keys. The first pattern that matches a key is used.
_KINDS = (
    (r"image_bind|prefix_query\.", "an adapter of ImageBind-LLM, which sees by ImageBind and not by CLIP"),
    (r"layers\.\d+\.(attention|feed_forward)\.w[1-3qkvo]_(bias|scale)$", "a LLaMA-Adapter for chat, without pictures"),
    (r"clip\.|(llama|llma)\.tok_embeddings", "a checkpoint of the adapter's trainer"),
    (r"(visual_blocks|adapter_query|visual_query|llama|llma)\.", ADAPTER),
    (r"visual\.(conv1|transformer)\.|vision_model\.", "a CLIP"),
    (r"tok_embeddings\.weight$|layers\.0\.attention\.w", "LLaMA weights in Meta's form"),
    (r"model\.layers\.|model\.embed_tokens\.", "a language model in Hugging Face's form"),
)

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFile:
    """The memory-mapped tensors of a file, on the CPU. `config` is what an adapter's release stores with them."""

    tensors: dict[str, Tensor]
    config: Mapping[str, Any]


def read_tensor_file(path: Path, *, torchscript: bool = False) -> TensorFile:
    """Read a safetensors file, known by its suffix, or a file of `torch.save`.

    A file of `torch.save` must contain a dictionary of tensors, at its top level or under the key "model". With
    `torchscript`, TorchScript archives are read too, without running their code, and plain numbers among the tensors,
    as in CLIP. The memory used is in proportion to the file's size, for any content. Raises CheckpointError for a
    missing, damaged or foreign file.
    """
    if path.suffix == ".safetensors":
        return TensorFile(tensors=read_safetensors(path), config={})
    require_file(path)
    try:
        file = TorchFile(path)
        if file.is_torchscript and not torchscript:
            raise CheckpointError(
                f"`{path}` is a TorchScript archive, as OpenAI publishes CLIP, where LLaMA or adapter weights are "
                "wanted",
                hint="if it is CLIP, pass it as --clip",
            )
        return _state_dict(file, numbers=torchscript)
    except ForeignObjectError as error:
        raise CheckpointError(
            f"`{path}` holds Python objects beside its tensors (`{shown_excerpt(error.name)}`), so it is not opened: "
            "loading it would run code from the file",
            hint="ask for the file's tensors alone, saved by `torch.save` as a dictionary, or as safetensors",
        ) from None
    except (PickleError, OSError) as error:
        if tells_shortage(str(error)):
            raise
        raise damaged(path, str(error)) from None


def _state_dict(file: TorchFile, *, numbers: bool) -> TensorFile:
    content = file.content
    if isinstance(content, Module):
        return TensorFile(tensors=file.tensors(module_tensors(content)), config={})
    if not isinstance(content, dict):
        raise CheckpointError(f"`{file.path}` holds no dictionary of tensors")
    config = content.get("config")
    if isinstance(content.get("model"), dict):
        content = content["model"]
    elif isinstance(config, dict):
        content = {key: value for key, value in content.items() if key != "config"}
    headers = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, TensorHeader)}
    plain = {
        key: torch.tensor(value)
        for key, value in content.items()
        if numbers and isinstance(key, str) and isinstance(value, int | float) and abs(value) < _LARGEST
    }
    for key, value in content.items():
        if isinstance(value, Unread) and value.tensor_kind is not None:
            raise _other_kind(f"`{file.path}`", str(key), value.tensor_kind)
    others = [str(key) for key in content if key not in headers and key not in plain]
    if others:
        raise CheckpointError(
            f"`{file.path}` is no plain dictionary of tensors; it also holds {list_keys(others)}",
            hint="ask for the file's tensors alone, as dense numbers of one type",
        )
    return TensorFile(tensors=file.tensors(headers) | plain, config=config if isinstance(config, dict) else {})


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file as memory-mapped tensors on the CPU.

    Raises CheckpointError for a missing, damaged or foreign file.
    """
    with open_safetensors(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, which are texts. Raises CheckpointError as `read_safetensors`."""
    with open_safetensors(path, framework="pt") as file:
        return dict(file.metadata() or {})


def check_dense(tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Raise CheckpointError unless all tensors are plain floating-point numbers: not sparse, quantised or absent."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _FLOATING:
            kind = f"{tensor.layout}, {tensor.dtype} on {tensor.device}".replace("torch.", "")
            raise _other_kind(what, name, kind)


def check_names(found: Collection[str], wanted: Collection[str], *, what: str, meaning: str) -> None:
    """Raise CheckpointError unless `found` has exactly the `wanted` names.

    `what` begins the message, `meaning` is its hint.
    """
    known, present = set(wanted), set(found)
    missing = [name for name in wanted if name not in present]
    unknown = [name for name in found if name not in known]
    parts = [f"lacks {len(missing)} tensors ({list_keys(missing)})"] if missing else []
    parts += [f"has {len(unknown)} tensors that do not belong there ({list_keys(unknown)})"] if unknown else []
    if parts:
        raise CheckpointError(f"{what} {' and '.join(parts)}", hint=meaning)


def check_shapes(found: Mapping[str, Shape], wanted: Mapping[str, Shape], *, what: str, meaning: str) -> None:
    """Raise CheckpointError at the first tensor whose shape is not the wanted one."""
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{what}: `{shown_excerpt(name)}` has the shape {list(found[name])}, where {list(shape)} is wanted",
                hint=meaning,
            )


def count_blocks(keys: Collection[str], prefix: str, *, what: str) -> int:
    """The highest number that follows `prefix`, such as `layers.`, in a key, plus one; 0 if there is none.

    Raises CheckpointError if that is far more than the number of keys, so that memory for blocks stays in
    proportion to the file.
    """
    pattern = re.compile(re.escape(prefix) + r"([0-9]{1,18})\.")
    highest = max((int(match[1]) for key in keys if (match := pattern.match(key))), default=-1)
    if highest > 2 * len(keys):
        raise CheckpointError(
            f"{what} has a tensor `{prefix}{highest}.*`, and {len(keys)} tensors in all: too few for so many blocks",
            hint="the file is damaged or was put together by hand; fetch it again",
        )
    return highest + 1


def what_is(keys: Collection[str]) -> str | None:
    """The kind of file that has these keys, for a message; None if unknown."""
    return next((kind for pattern, kind in _KINDS if any(re.match(pattern, key) for key in keys)), None)


def require_numbers(
    content: Mapping[str, Any], *, path: Path, whole: Sequence[str], real: Sequence[str], hint: str
) -> None:
    """Raise CheckpointError unless the entries `whole` are integers of 64 bits and `real` finite, all above 0."""
    wrong = [name for name in whole if type(content.get(name)) is not int or not 0 < content[name] < _LARGEST]
    for name in real:
        if type(content.get(name)) not in (int, float) or not 0 < content[name] <= sys.float_info.max:
            wrong.append(name)
    if wrong:
        raise CheckpointError(f"`{path}` has no number, or an impossible one, for {list_keys(wrong)}", hint=hint)


def _other_kind(what: str, name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{what} holds `{shown_excerpt(name)}` as a tensor of another kind ({kind}), where dense "
        "floating-point numbers are wanted",
        hint="take the original file, before quantisation or other conversions",
    )
