"""Files of stored tensors in the safetensors format: written tensor by tensor, mapped and checked when read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.scheme import TensorForm, dtype_name
from llama_adapter.runtime.schemes.state import check_stored
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.text import shown_excerpt

_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class TensorWriter:
    """A context manager that writes a safetensors file tensor by tensor, and casts float types.

    The safetensors package needs all tensors in memory, twice.
    """

    def __init__(
        self, path: Path, *, forms: Mapping[str, TensorForm], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Open the file and write its header: names and forms of all tensors, and `metadata`. Raises OSError."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self._places: dict[str, int] = {}
        offset = 0
        for name, form in sorted(forms.items(), key=_alignment):
            end = offset + form.num_bytes
            kind = _SAFETENSORS_NAMES[form.dtype]
            header[name] = {"dtype": kind, "shape": list(form.shape), "data_offsets": [offset, end]}
            self._places[name], offset = offset, end
        encoded = json.dumps(header).encode()
        encoded += b" " * (-(8 + len(encoded)) % 64)  # mapped tensors then start at a cache line
        self._start = 8 + len(encoded)
        self._missing = dict(forms)
        self._file = path.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; the order does not matter.

        Raises ValueError if its name is unknown or was already written, its shape differs, or it has integers instead
        of floats or the reverse.
        """
        form = self._missing.get(name)
        if form is None or form.shape != tuple(tensor.shape):
            raise ValueError(f"tensor `{name}` of shape {list(tensor.shape)} is unknown, or repeated")
        if form.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise ValueError(f"tensor `{name}` is {dtype_name(tensor.dtype)}, where {form} is wanted")
        del self._missing[name]
        self._file.seek(self._start + self._places[name])
        self._file.write(tensor.detach().to("cpu", form.dtype).contiguous().flatten().view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close the file. Raises ValueError if a tensor is missing."""
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"tensors are missing: {list_keys(list(self._missing))}")


def _alignment(item: tuple[str, TensorForm]) -> tuple[bool, int]:
    """A sort key. In this order, each tensor is aligned to its dtype, and to cache lines if its size is a multiple."""
    return item[1].num_bytes % 64 > 0, -item[1].dtype.itemsize


def check_tensors(state: Mapping[str, Tensor], *, forms: Mapping[str, TensorForm], path: Path, hint: str) -> None:
    """Raise CheckpointError unless the tensors of the file at `path` have these names and forms and are undamaged."""
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
