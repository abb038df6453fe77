"""ONNX files from other programs: with any shape and type that a test needs, and without card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "uint8": TensorProto.UINT8}
QUERIES, WIDTH = 2, 3


def foreign_onnx(
    path: Path,
    shape: Sequence[int | str],
    *,
    dtype: str = "float32",
    output_shape: Sequence[int | str] = ("batch", QUERIES, WIDTH),
    outputs: int = 1,
    only_batch: int = -1,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A graph that gives the mean of a picture, times 1 to 6. It fails for batches other than `only_batch`."""
    weights = np.arange(1, QUERIES * WIDTH + 1, dtype=np.float32).reshape(1, QUERIES * WIDTH)
    sizes = [QUERIES, WIDTH] if len(output_shape) == 3 else [QUERIES * WIDTH]
    target = np.array([only_batch, *sizes], dtype=np.int64)
    nodes = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["floats"], ["flat"], axis=1),
        helper.make_node("ReduceMean", ["flat", "axes"], ["mean"], keepdims=1),
        helper.make_node("MatMul", ["mean", "weights"], ["product"]),
        *(helper.make_node("Reshape", ["product", "target"], [f"query{index}"]) for index in range(outputs)),
    ]
    constants = {"axes": np.array([1], dtype=np.int64), "weights": weights, "target": target}
    graph: Any = helper.make_graph(
        nodes,
        "foreign",
        [helper.make_tensor_value_info("pixels", TYPES[dtype], list(shape))],
        [
            helper.make_tensor_value_info(f"query{index}", TensorProto.FLOAT, list(output_shape))
            for index in range(outputs)
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    helper.set_model_props(model, metadata or {})
    onnx.save(model, path)
    return path
