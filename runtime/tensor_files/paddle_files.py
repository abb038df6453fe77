"""Reads Paddle's `.pdparams`, a pickle of a dictionary of numpy arrays, as data: no function that it names is called.

Format: `paddle.save` of a state dict. Numbers of type bfloat16 are stored as uint16.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from llama_adapter.runtime.tensor_files.arrays import damaged, require_file

_MAX_BYTES: Final = 1 << 32  # a LoRA of 65B has a tenth of it
_NUMPY: Final = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
_TYPES: Final = {"f2": "<f2", "f4": "<f4", "f8": "<f8", "u2": "<u2"}
_LEFT_OUT: Final = pickle.DICT + pickle.EMPTY_SET + pickle.FROZENSET + pickle.BYTEARRAY8  # any keys; any length
_PARAMETER_NAMES: Final = "StructuredToParameterName@@"  # names inside Paddle


class _Type:
    """A pickled dtype, by its name such as f4."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name, self.order = name if isinstance(name, str) else "", "<"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Array:
    """A pickled array: its state is (version, shape, dtype, whether it is in Fortran's order, bytes)."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Names(dict[str, Any]):
    """A dictionary whose keys are texts: Python hashes nested tuples recursively in C, without a limit on the depth."""

    def __setitem__(self, name: Any, value: Any) -> None:
        if not isinstance(name, str):
            raise TypeError("one of its names is no text")
        super().__setitem__(name, value)


class _Reader(pickle._Unpickler):
    """Python's own loop, whose memory is bounded by the file's size; every name becomes a stand-in."""

    dispatch: ClassVar[dict[int, Any]] = {
        opcode: load for opcode, load in pickle._Unpickler.dispatch.items() if opcode not in _LEFT_OUT
    } | {pickle.EMPTY_DICT[0]: lambda self: self.append(_Names())}

    def find_class(self, module: str, name: str) -> Any:
        if module in _NUMPY and name in ("_reconstruct", "ndarray"):
            return _Array
        if module in _NUMPY and name == "dtype":
            return _Type
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_pdparams(path: Path) -> dict[str, Tensor]:
    """The tensors by name. Raises CheckpointError for a file that is missing, damaged or holds anything else."""
    require_file(path)
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise damaged(path, f"it has more than {_MAX_BYTES:,} bytes")
    try:
        values = _Reader(io.BytesIO(path.read_bytes())).load()
        values.pop(_PARAMETER_NAMES, None)
        if sum(len(value.state[-1]) for value in values.values() if isinstance(value, _Array)) > 4 * size:
            raise ValueError("its arrays have more bytes than four such files")
        return {name: _tensor(value) for name, value in values.items()}
    except Exception as error:  # a damaged pickle may raise any error
        raise damaged(path, str(error) or type(error).__name__) from None


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, _Array):
        raise TypeError("it holds something other than arrays")
    _, shape, kind, is_fortran, data = value.state
    if not isinstance(kind, _Type) or kind.name not in _TYPES or kind.order != "<":
        raise TypeError("its numbers have an unknown type")
    number_type = np.dtype(_TYPES[kind.name])
    is_plain = isinstance(data, bytes) and all(type(side) is int for side in shape)
    if not is_plain or len(data) != math.prod(shape) * number_type.itemsize:
        raise ValueError("an array has another number of bytes than its shape")
    array = np.frombuffer(bytearray(data), dtype=number_type).reshape(shape, order="F" if is_fortran else "C")
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if kind.name == "u2" else tensor
