"""Files of stored tensors in the safetensors format: written tensor by tensor, mapped and checked when read."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.scheme import TensorForm, dtype_name
from llama_adapter.runtime.schemes.state import check_stored
from llama_adapter.runtime.tensor_files.files import list_keys
from llama_adapter.runtime.text import shown_excerpt

_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def write_tensors(path: Path, *, tensors: Iterable[tuple[str, Tensor]], forms: Mapping[str, TensorForm]) -> None:
    """Write tensors of the given names and forms as they come; float types are cast.

    safetensors' own writer needs all of them in memory, twice. Raises ValueError for a tensor that is missing,
    repeated, of another name or shape, or of integers in place of floats or the reverse.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, form in sorted(forms.items(), key=_alignment):
        end = offset + form.num_bytes
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)  # mapped tensors then start at a cache line
    missing = dict(forms)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors:
            if name not in missing or forms[name].shape != tuple(tensor.shape):
                raise ValueError(f"tensor `{name}` of shape {list(tensor.shape)} is unknown, or repeated")
            form = missing.pop(name)
            if form.dtype.is_floating_point != tensor.dtype.is_floating_point:
                raise ValueError(f"tensor `{name}` is {dtype_name(tensor.dtype)}, where {form} is wanted")
            file.seek(8 + len(encoded) + header[name]["data_offsets"][0])
            file.write(tensor.detach().to("cpu", form.dtype).contiguous().flatten().view(torch.uint8).numpy().data)
    if missing:
        raise ValueError(f"tensors are missing: {list_keys(list(missing))}")


def _alignment(item: tuple[str, TensorForm]) -> tuple[bool, int]:
    """Order in which all tensors are aligned to their numbers, and those that fill cache lines to cache lines."""
    return item[1].num_bytes % 64 > 0, -item[1].dtype.itemsize


def check_tensors(state: Mapping[str, Tensor], *, forms: Mapping[str, TensorForm], path: Path, hint: str) -> None:
    """Raise CheckpointError unless the tensors of the file at `path` have these names and forms and are sound."""
    missing = [key for key in forms if key not in state]
    unknown = [key for key in state if key not in forms]
    if missing or unknown:
        parts = [f"lacks {list_keys(missing)}"] if missing else []
        parts += [f"holds {list_keys(unknown)}, unknown to its configuration"] if unknown else []
        raise CheckpointError(f"`{path}` {' and '.join(parts)}", hint=hint)
    for key, form in forms.items():
        found = TensorForm(tuple(state[key].shape), state[key].dtype)
        if found != form:
            raise CheckpointError(
                f"`{path}` holds `{shown_excerpt(key)}` as {found}, where {form} is wanted", hint=hint
            )
    check_stored(state, path=path, hint=hint)
