"""Files of a bundle's tensors: which there must be for a configuration, of which shape and type, and how they are
written and read. What the tensors mean is decided by the modules they are the state dicts of."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama_adapter.app.models.quantising import SCALE, is_scale, linear_weights
from llama_adapter.app.models.spec import Precision
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.files import list_keys, read_safetensors
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder

DAMAGED = "the bundle is damaged or was changed by hand; write it again with `llama-adapter convert`"
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8"}


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a stored tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """In the file and in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a number type as manifests and flags write it."""
    return str(dtype).removeprefix("torch.")


def sketch(config: VisionConfig | DecoderConfig) -> nn.Module:
    """The half of a model that a configuration describes, on the meta device: names and shapes without numbers.

    Raises CheckpointError for sizes beyond what torch can count.
    """
    try:
        with torch.device("meta"):
            if isinstance(config, VisionConfig):
                return PictureEncoder(config)
            # The rotary table is made for real, is as long as the context, and is not in the state dict.
            return LlamaAdapterDecoder(dataclasses.replace(config, context=1))
    except (RuntimeError, TypeError):  # the second for a side beyond 64 bits
        raise CheckpointError("The configuration asks for tensors larger than any memory", hint=DAMAGED) from None


def expected_forms(
    config: VisionConfig | DecoderConfig, *, dtype: torch.dtype, precision: Precision = "float"
) -> dict[str, TensorForm]:
    """Names and forms of the tensors that a configuration asks for, stored in `dtype` and, with int8, in 8 bits.

    Raises CheckpointError as `sketch`.
    """
    module = sketch(config)
    linears = linear_weights(module) if precision == "int8" else frozenset()
    forms = {}
    for name, tensor in module.state_dict().items():
        shape = tuple(tensor.shape)
        forms[name] = TensorForm(shape, torch.int8 if name in linears else dtype)
        if name in linears:
            forms[name + SCALE] = TensorForm(shape[:1], torch.float32)
    return forms


def write_tensors(path: Path, *, tensors: Iterable[tuple[str, Tensor]], forms: Mapping[str, TensorForm]) -> None:
    """Write tensors of the given names and forms as safetensors, each as it comes; float types are cast.

    safetensors' own writer wants all of them in memory, twice. Raises ValueError for a tensor that is missing, comes
    twice, or has another name or shape, or that is whole numbers where others are wanted or the other way round.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, form in sorted(forms.items(), key=lambda item: -item[1].dtype.itemsize):  # so that all are aligned
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
                raise ValueError(f"tensor `{name}` of shape {list(tensor.shape)} is not wanted here, or came twice")
            form = missing.pop(name)
            if form.dtype.is_floating_point != tensor.dtype.is_floating_point:
                raise ValueError(f"tensor `{name}` is {dtype_name(tensor.dtype)}, where {form} is wanted")
            file.seek(8 + len(encoded) + header[name]["data_offsets"][0])
            file.write(tensor.detach().to("cpu", form.dtype).contiguous().flatten().view(torch.uint8).numpy().data)
    if missing:
        raise ValueError(f"tensors are missing: {list_keys(list(missing))}")


def read_tensors(
    path: Path, *, config: VisionConfig | DecoderConfig, dtype: torch.dtype, precision: Precision
) -> dict[str, Tensor]:
    """The tensors of a file, mapped from it.

    Raises CheckpointError unless they are those that `expected_forms` names, and all scales of 8-bit weights are finite
    and above 0. A configuration of more layers than the file has tensors is refused before a module is built of it.
    """
    state = read_safetensors(path)
    layers = config.clip.num_layers + config.query.depth if isinstance(config, VisionConfig) else config.num_layers
    if layers > len(state):
        raise CheckpointError(
            f"`{path}` has {len(state)} tensors, and its configuration speaks of {layers:,} layers", hint=DAMAGED
        )
    forms = expected_forms(config, dtype=dtype, precision=precision)
    missing = [key for key in forms if key not in state]
    unknown = [key for key in state if key not in forms]
    if missing or unknown:
        parts = [f"lacks {list_keys(missing)}"] if missing else []
        parts += [f"holds {list_keys(unknown)}, unknown to its configuration"] if unknown else []
        raise CheckpointError(f"`{path}` {' and '.join(parts)}", hint=DAMAGED)
    for key, form in forms.items():
        found = TensorForm(tuple(state[key].shape), state[key].dtype)
        if found != form:
            raise CheckpointError(
                f"`{path}` holds `{shown_excerpt(key)}` as {found}, where {form} is wanted", hint=DAMAGED
            )
    wrong = [key for key in forms if is_scale(key) and not _are_scales(state[key])]
    if wrong:
        raise CheckpointError(
            f"`{path}` has scales that are not finite numbers above 0, in {list_keys(wrong)}", hint=DAMAGED
        )
    return state


def _are_scales(numbers: Tensor) -> bool:
    return bool((numbers.isfinite() & (numbers > 0)).all())
