"""Builds ONNX graphs node by node: what the graphs of decoders and of picture encoders have in common."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

_IR_VERSION: Final = 8  # of the ONNX releases with opsets 17 and 18; readers of that age refuse newer versions


class OnnxBuilder:
    """Records the nodes of one graph after the other, between `_begin` and `_model`."""

    def __init__(self, float_dtype: str, *, opsets: Mapping[str, int]) -> None:
        self._float_dtype = float_dtype  # of weights and activations: float32 or float16
        self._opsets = opsets  # by domain

    def _begin(self) -> None:
        from onnx_ir.tape import Tape

        self._tape: Any = Tape()  # records the nodes of the graph that is being built
        self._inputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}

    def _model(self, name: str, outputs: "Sequence[tuple[str, ir.Value, str, Sequence[Any]]]") -> "ir.Model":
        """The recorded graph. Each output is a name, the value, its dtype and its shape."""
        import onnx_ir as ir

        for port, value, dtype, shape in outputs:
            value.name = port
            value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
            value.shape = ir.Shape(list(shape))
        graph = ir.Graph(
            self._inputs,
            [value for _, value, _, _ in outputs],
            nodes=self._tape.nodes,
            initializers=list(self._initializers.values()),
            opset_imports=dict(self._opsets),
            name=name,
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="llama-adapter")

    def _op(self, operator: str, *inputs: "ir.Value", **attributes: Any) -> "ir.Value":
        value: ir.Value = self._tape.op(operator, list(inputs), attributes=attributes)
        return value

    def _op_n(self, operator: str, inputs: "Sequence[ir.Value]", count: int, **attributes: Any) -> "Sequence[ir.Value]":
        made = self._tape.op_multi_out(operator, list(inputs), attributes=attributes, num_outputs=count)
        values: Sequence[ir.Value] = made
        return values

    def _split(self, value: "ir.Value", *, axis: int, sizes: Sequence[int]) -> "Sequence[ir.Value]":
        return self._op_n("Split", [value, self._ints(*sizes)], len(sizes), axis=axis)

    def _cast(self, value: "ir.Value", dtype: str) -> "ir.Value":
        """Cast to a float type; does nothing in a float32 graph."""
        if self._float_dtype == "float32":
            return value
        return self._op("Cast", value, to=1 if dtype == "float32" else 10)

    def _input(self, name: str, dtype: str, shape: Sequence[Any]) -> "ir.Value":
        import onnx_ir as ir

        value = ir.val(name, ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape(list(shape)))
        self._inputs.append(value)
        return value

    def _ints(self, *values: int) -> "ir.Value":
        return self._constant(np.array(values, np.int64))

    def _int(self, value: int) -> "ir.Value":
        return self._constant(np.array(value, np.int64))

    def _scalar(self, value: float, dtype: str | None = None) -> "ir.Value":
        return self._constant(np.array(value, dtype or self._float_dtype))

    def _constant(self, values: np.ndarray) -> "ir.Value":
        """Values as an initializer, which equal values share."""
        digest = hashlib.sha256(repr(values.shape).encode() + values.tobytes()).hexdigest()[:16]
        return self._array(f"constant_{values.dtype}_{digest}", values)

    def _array(self, name: str, values: np.ndarray) -> "ir.Value":
        """Values as an initializer of this name. They may be a view: they are copied while the file is written."""
        import onnx_ir as ir

        return self._initializer(name, lambda: ir.Tensor(values, name=name))

    def _initializer(self, name: str, make: Callable[[], Any]) -> "ir.Value":
        """The initializer of this name, with the tensor that `make` returns when the name is new."""
        import onnx_ir as ir

        if name not in self._initializers:
            tensor = make()
            self._initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
            )
        return self._initializers[name]
