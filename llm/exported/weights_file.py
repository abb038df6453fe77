"""Writes the weights of exported graphs, tensor by tensor, into one file that all graphs read."""

# O outputs, I inputs, G groups of inputs

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

import numpy as np

from llama_adapter.llm.config import FINER_WEIGHTS
from llama_adapter.runtime.errors import GraphError

if TYPE_CHECKING:
    from torch import Tensor

ExportPrecision = Literal["float32", "float16", "int8", "int4"]
PRECISIONS: Final = ("float32", "float16", "int8", "int4")
GROUP: Final = 32  # weights that share a scale, in int4 and int8
_ALIGNMENT: Final = 64
_SCALE = "_scale"  # suffix of scales in the schemes int8 and int4


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The location of a tensor in the file."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def read(self, path: Path) -> np.ndarray:
        """Its values, from the file at `path`."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return np.fromfile(path, self.dtype, count=count, offset=self.offset).reshape(self.shape)

    def rows(self, start: int, stop: int) -> "Stored":
        """Rows start..stop-1, which are contiguous in the file."""
        row_bytes = self.num_bytes // self.shape[0]
        shape, offset = (stop - start, *self.shape[1:]), self.offset + start * row_bytes
        return replace(self, name=f"{self.name}[{start}:{stop}]", shape=shape, offset=offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A stored matrix (O, I), and its scales (O, G) if it is quantised."""

    weight: Stored
    scales: Stored | None
    num_inputs: int
    bits: int  # 32 or 16 for floats
    group: int  # inputs that share a scale

    @property
    def num_outputs(self) -> int:
        """O."""
        return self.weight.shape[0]

    def rows(self, start: int, stop: int) -> "Linear":
        """Outputs start..stop-1."""
        scales = None if self.scales is None else self.scales.rows(start, stop)
        return replace(self, weight=self.weight.rows(start, stop), scales=scales)


class WeightsFile:
    """Writes tensors one after the other, and records their locations."""

    def __init__(self, file: BinaryIO, *, precision: ExportPrecision) -> None:
        self.precision = precision
        self.float_dtype = "float16" if precision == "float16" else "float32"  # of activations, cache and float tensors
        self.linears: dict[str, Linear] = {}  # by the name of the weight
        self.tensors: dict[str, Stored] = {}  # all others
        self._file = file

    def write(self, tensors: "Iterable[tuple[str, Tensor]]", *, linears: Iterable[str]) -> None:
        """Write a decoder's state dict. `linears` are the names of matrices that may be quantised.

        One tensor is in memory at a time; two if the model is already quantised. Raises GraphError for values that the
        precision cannot represent.
        """
        import torch

        quantisable = frozenset(linears)
        pending: tuple[str, Tensor] | None = None  # a quantised weight that waits for its scales
        for name, tensor in tensors:
            if tensor.dtype in (torch.int8, torch.uint8):
                pending = name, tensor
            elif pending is not None and name == pending[0] + _SCALE:
                self._write_quantised(*pending, scales=tensor)
                pending = None
            elif name in quantisable and tensor.ndim == 2:
                self._write_linear(name, tensor)
            else:
                self.tensors[name] = self._store(name, self._floats(name, tensor))
        if pending is not None:
            raise AssertionError(f"`{pending[0]}` came without scales")

    def _write_linear(self, name: str, tensor: "Tensor") -> None:
        if self.precision in ("float32", "float16"):
            weight = self._store(name, self._floats(name, tensor))
            bits = 8 * np.dtype(self.float_dtype).itemsize
            self.linears[name] = Linear(weight=weight, scales=None, num_inputs=tensor.shape[1], bits=bits, group=0)
            return
        num_inputs = tensor.shape[1]
        if self._precision_of(name) == "int8":
            codes, scales = quantise_to_8_bits(_finite(name, tensor.float().numpy()))
            self._write_codes(name, codes, scales, num_inputs=num_inputs, bits=8)
            return
        from llama_adapter.runtime.schemes.int4 import quantise_groups

        try:
            groups, steps = quantise_groups(tensor)
        except ValueError as error:
            raise GraphError(f"Values of `{name}` are {error}", hint="the checkpoint is damaged") from None
        self._write_codes(name, groups.numpy(), steps.numpy(), num_inputs=num_inputs, bits=4)

    def _precision_of(self, name: str) -> ExportPrecision:
        return "int8" if self.precision == "int4" and name in FINER_WEIGHTS else self.precision

    def _write_quantised(self, name: str, weight: "Tensor", *, scales: "Tensor") -> None:
        """Write a weight that is already quantised.

        If the export has the same precision, its values are kept exactly.
        """
        from llama_adapter.runtime.schemes.scheme import scheme_of

        scheme = scheme_of(weight.dtype)
        assert scheme is not None, "the caller looks at the type"
        if scheme.name not in (self.precision, self._precision_of(name)):
            self._write_linear(name, scheme.dequantise({"": weight, _SCALE: scales}))
            return
        if scheme.name == "int4":
            # A byte holds two codes, and 8 is the code of 0.
            codes, steps = _in_groups(weight.numpy(), filler=0x88, size=GROUP // 2), scales.numpy()
        else:  # the scale of a row is repeated for every group
            codes = _in_groups((weight.numpy().astype(np.int16) + 128).astype(np.uint8), filler=128)
            steps = np.repeat(scales.float().numpy()[:, None], codes.shape[1], axis=1)
        bits, num_inputs = (4, 2 * weight.shape[1]) if scheme.name == "int4" else (8, weight.shape[1])
        self._write_codes(name, codes, steps, num_inputs=num_inputs, bits=bits)

    def _write_codes(self, name: str, codes: np.ndarray, scales: np.ndarray, *, num_inputs: int, bits: int) -> None:
        self.linears[name] = Linear(
            weight=self._store(name, codes),
            scales=self._store(f"{name}_scales", scales.astype(np.float32)),
            num_inputs=num_inputs,
            bits=bits,
            group=GROUP,
        )

    def _floats(self, name: str, tensor: "Tensor") -> np.ndarray:
        values = tensor.detach().float().cpu().numpy()
        with np.errstate(over="ignore"):
            cast = values.astype(self.float_dtype)
        if self.float_dtype == "float16" and np.isfinite(values).all() and not np.isfinite(cast).all():
            raise GraphError(f"Values of `{name}` are too large for float16", hint="export with --precision float32")
        return _finite(name, cast)

    def _store(self, name: str, values: np.ndarray) -> Stored:
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        stored = Stored(name=name, dtype=values.dtype.name, shape=values.shape, offset=self._file.tell())
        self._file.write(np.ascontiguousarray(values).data)
        return stored


def quantise_to_8_bits(weight_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrix (O, I) -> codes uint8 (O, G, group) and scales (O, G) in float32.

    W = (code - 128) * scale, rounded to nearest. The weight of largest magnitude in a group gets the code 0, so a scale
    is minus this weight divided by 128. This gives one more step of range than the largest code would.
    """
    weight_OGI = _in_groups(weight_OI, filler=0)
    places = np.abs(weight_OGI).argmax(-1)
    extreme_OG = np.take_along_axis(weight_OGI, places[..., None], -1)[..., 0]
    scales_OG = np.where(extreme_OG == 0, np.float32(1), -extreme_OG / 128).astype(np.float32)
    codes = np.clip(np.rint(weight_OGI / scales_OG[..., None]), -128, 127) + 128
    return codes.astype(np.uint8), scales_OG


def _in_groups(weight_OI: np.ndarray, *, filler: int, size: int = GROUP) -> np.ndarray:
    """(O, I) -> (O, G, size), the last group padded with `filler`."""
    num_outputs, num_inputs = weight_OI.shape
    missing = -num_inputs % size
    if missing:
        weight_OI = np.pad(weight_OI, ((0, 0), (0, missing)), constant_values=filler)
    return weight_OI.reshape(num_outputs, -1, size)


def _finite(name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise GraphError(f"Values of `{name}` are not finite", hint="the checkpoint is damaged")
    return values


def external(stored: Stored, *, location: str, folder: Path) -> Any:
    """The tensor for an ONNX graph, as a reference into the file `location` of `folder`."""
    import onnx_ir as ir

    return ir.ExternalTensor(
        location,
        stored.offset,
        stored.num_bytes,
        ir.DataType.from_numpy(np.dtype(stored.dtype)),
        shape=ir.Shape(stored.shape),
        name=stored.name,
        base_dir=folder,
    )
