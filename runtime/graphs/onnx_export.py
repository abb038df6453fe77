"""Writes an ONNX file for ATC and onnxruntime, with its card and a digest of its bytes."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import METADATA_KEY, GraphCard, GraphDtype
from llama_adapter.runtime.graphs.defaults import OPSETS
from llama_adapter.runtime.graphs.packages import require
from llama_adapter.runtime.graphs.seal import SEAL_KEY, blank_seal, seal
from llama_adapter.runtime.partial import partial_folder

if TYPE_CHECKING:
    import onnx_ir

DTYPES: Final[Mapping[GraphDtype, torch.dtype]] = {"float32": torch.float32, "float16": torch.float16}
_MAX_PROTOBUF_BYTES = 2_000_000_000  # protobuf's limit is 2 GiB; the rest is for the graph itself


def check_export(*, dtype: str, opset: int) -> None:
    """Raise ValueError for an unsupported type or opset, and GraphError if a required package is missing."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32 or float16, got {dtype!r}")
    if opset not in OPSETS:
        raise ValueError(f"opset must be 17 or 18, got {opset!r}")
    require("onnx", "onnx-ir")


def cast_weights(state: Mapping[str, Tensor], *, dtype: GraphDtype) -> dict[str, Tensor]:
    """The tensors in `dtype` on the CPU. Raises GraphError for numbers that are not finite in `dtype`."""
    cast = {key: tensor.detach().cpu().to(DTYPES[dtype]) for key, tensor in state.items()}
    for key, tensor in cast.items():
        if not bool(torch.isfinite(tensor).all()):
            if bool(torch.isfinite(state[key]).all()):
                raise GraphError(f"Values of `{key}` are too large for float16", hint="export with --dtype float32")
            raise GraphError(f"Values of `{key}` are not finite", hint="the checkpoint is damaged")
    return cast


def write_graph(
    model: "onnx_ir.Model", path: Path, *, card: GraphCard, check: Callable[[Path], None] | None = None
) -> None:
    """Write an ONNX file, which appears complete or not at all. Its metadata have the card and a digest of its bytes.

    Weights of more than 2 GB are written to `<path>.data`. The names of all nodes begin with the graph's name, because
    compilers drop the metadata but keep names. `check` is called with the complete file before it is moved to `path`.
    If `check` raises, nothing is written.
    """
    import onnx_ir

    for node in model.graph:
        node.name = f"{model.graph.name}.{node.name}"
    target = path.resolve()
    num_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    weights = f"{target.name}.data" if num_bytes > _MAX_PROTOBUF_BYTES else None
    model.metadata_props.update({METADATA_KEY: card.to_json(), SEAL_KEY: blank_seal(weights)})
    target.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(target) as partial:
        onnx_ir.save(model, partial / target.name, external_data=weights)
        seal(partial / target.name, weights=weights)
        if check is not None:
            check(partial / target.name)
        if weights is not None:
            os.replace(partial / weights, target.parent / weights)
        os.replace(partial / target.name, target)  # the graph comes last, because it makes the export complete
