"""Simulates MindSpore Lite 2.10: the documented classes over MindSpore, which runs the same MindIR on the CPU.

Types and orders of arguments are checked as documented. Environment variables: FAKE_ASCENDS is the number of Ascend
devices, FAKE_FAIL=predict makes predictions fail. `RECORD` has the models that were built and resized.
"""

import configparser
import enum
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

from llama_adapter.runtime.graphs.mindir import graph_mode, open_tensor, read_mindir

__version__ = "2.10.0"


class DataType(enum.Enum):
    BOOL = 30
    INT32 = 34
    INT64 = 35
    FLOAT16 = 42
    FLOAT32 = 43


class ModelType(enum.Enum):
    MINDIR = 0
    MINDIR_LITE = 4


@dataclass
class Record:
    """Calls recorded for tests."""

    built: list[dict[str, Any]] = field(default_factory=list)
    resized: list[list[list[int]]] = field(default_factory=list)


RECORD = Record()


def _check(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be {kind.__name__}, but got {type(value)}.")


class _Part:
    """A part of a context. Its attributes keep their types."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            raise AttributeError(f"there is no attribute {name}")
        _check(name, value, type(getattr(self, name)))
        vars(self)[name] = value


class Context:
    def __init__(self) -> None:
        self.cpu, self.ascend = _Part(thread_num=0), _Part(device_id=0, provider="")
        self._target = ["cpu"]

    @property
    def target(self) -> list[str]:
        return self._target

    @target.setter
    def target(self, target: list[str]) -> None:
        _check("target", target, list)
        for element in target:
            _check("target element", element, str)
            if element.lower() not in ("cpu", "gpu", "ascend"):
                raise ValueError(f"target elements must be in ['cpu', 'gpu', 'ascend'], but got {element.lower()}.")
        self._target = target


class Tensor:
    def __init__(self, name: str, dtype: DataType, shape: list[int]) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self._data: np.ndarray | None = None

    @property
    def data_size(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype.name.lower()).itemsize

    def set_data_from_numpy(self, numpy_obj: np.ndarray) -> None:
        _check("numpy_obj", numpy_obj, np.ndarray)
        if DataType[numpy_obj.dtype.name.upper()] is not self.dtype:
            raise RuntimeError(f"data type not equal! Numpy type: {numpy_obj.dtype.type}, Tensor type: {self.dtype}")
        if not numpy_obj.flags["C_CONTIGUOUS"]:
            raise RuntimeError("Data type of numpy_obj is not contiguous.")
        if numpy_obj.nbytes != self.data_size:
            raise RuntimeError(f"data size not equal! Numpy size: {numpy_obj.nbytes}, Tensor size: {self.data_size}")
        self._data = numpy_obj  # kept by reference

    def get_data_to_numpy(self) -> np.ndarray:
        assert self._data is not None
        return self._data


@dataclass
class TensorMeta:
    name: str
    dtype: DataType
    shape: list[int]


class Model:
    def __init__(self) -> None:
        self._cell: Any = None

    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Context | None = None,
        config_path: str = "",
        config_dict: dict[str, dict[str, str]] | None = None,
    ) -> None:
        _check("model_path", model_path, str)
        _check("model_type", model_type, ModelType)
        _check("config_path", config_path, str)
        if context is not None:
            _check("context", context, Context)
        if not os.path.exists(model_path):
            raise RuntimeError("build_from_file failed, model_path does not exist!")
        options = configparser.ConfigParser()
        options.optionxform = str  # type: ignore[assignment,method-assign]
        if config_path and not options.read(config_path):
            raise RuntimeError("build_from_file failed, config_path does not exist!")
        context = context or Context()
        if "ascend" in context.target and context.ascend.device_id >= int(os.environ.get("FAKE_ASCENDS", "0")):
            raise RuntimeError("build_from_file failed! Error is Common error code.")
        described = read_mindir(Path(model_path))
        with graph_mode(mindspore):
            self._cell = nn.GraphCell(mindspore.load(model_path))
        self._cell.set_inputs(*(open_tensor(mindspore, port) for port in described.inputs))
        self._inputs = [
            Tensor(f"graph_input-{number}", DataType[port.dtype.upper()], list(port.shape))
            for number, port in enumerate(described.inputs)
        ]
        self._outputs = [
            TensorMeta(f"graph_output-{number}", DataType[port.dtype.upper()], list(port.shape))
            for number, port in enumerate(described.outputs)
        ]
        RECORD.built.append(
            {
                "path": model_path,
                "target": context.target,
                "device_id": context.ascend.device_id,
                "provider": context.ascend.provider,
                "options": {section: dict(options[section]) for section in options.sections()},
            }
        )

    def get_inputs(self) -> list[Tensor]:
        return list(self._inputs)

    def get_outputs(self) -> list[TensorMeta]:
        return list(self._outputs)

    def resize(self, inputs: list[Tensor], dims: list[list[int]]) -> None:
        _check("inputs", inputs, list)
        _check("dims", dims, list)
        if len(inputs) != len(dims):
            raise ValueError(f"inputs' size does not match dims' size, {len(inputs)} and {len(dims)}.")
        for tensor, sizes in zip(inputs, dims, strict=True):
            _check("inputs element", tensor, Tensor)
            _check("dims element", sizes, list)
            for size in sizes:
                _check("dims element's element", size, int)
            if len(tensor.shape) != len(sizes):
                raise ValueError(f"one of inputs' size does not match one of dims' size: {tensor.shape} and {sizes}.")
        for tensor, sizes in zip(inputs, dims, strict=True):
            tensor.shape, tensor._data = sizes, None
        RECORD.resized.append(dims)

    def predict(self, inputs: list[Tensor], outputs: list[Tensor] | None = None) -> list[Tensor]:
        _check("inputs", inputs, list)
        for tensor in inputs:
            _check("inputs element", tensor, Tensor)
        if os.environ.get("FAKE_FAIL") == "predict" or any(tensor._data is None for tensor in inputs):
            raise RuntimeError("predict failed! Error is Common error code.")
        arrays = [tensor._data.reshape(tensor.shape) for tensor in inputs if tensor._data is not None]
        with graph_mode(mindspore):
            given = self._cell(*(mindspore.Tensor(array) for array in arrays))
        results = [output.asnumpy() for output in (given if isinstance(given, tuple) else (given,))]
        made = []
        for meta, array in zip(self._outputs, results, strict=True):
            tensor = Tensor(meta.name, meta.dtype, list(array.shape))
            tensor.set_data_from_numpy(np.ascontiguousarray(array))
            made.append(tensor)
        return made
