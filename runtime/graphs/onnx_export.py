"""Exports a torch module as an ONNX file for ATC and onnxruntime, with its card and a digest of its bytes."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import METADATA_KEY, GraphCard, GraphDtype
from llama_adapter.runtime.graphs.defaults import OPSETS
from llama_adapter.runtime.graphs.packages import require
from llama_adapter.runtime.graphs.seal import SEAL_KEY, blank_seal, seal
from llama_adapter.runtime.partial import partial_folder

if TYPE_CHECKING:
    import onnx_ir

DTYPES: Final[Mapping[GraphDtype, torch.dtype]] = {"float32": torch.float32, "float16": torch.float16}
_TRACED_OPSET: Final = 18  # the opset of torch's exporter; its graph is converted to lower opsets
_IR_VERSION: Final = 8  # of the ONNX releases with opsets 17 and 18; readers of that age refuse newer versions
_MAX_PROTOBUF_BYTES = 2_000_000_000  # protobuf's limit is 2 GiB; the rest is for the graph itself


def check_export(*, dtype: str, opset: int) -> None:
    """Raise ValueError for an unsupported type or opset, and GraphError if a required package is missing."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32 or float16, got {dtype!r}")
    if opset not in OPSETS:
        raise ValueError(f"opset must be 17 or 18, got {opset!r}")
    require("onnx", "onnxscript")


def export_graph(
    module: nn.Module,
    inputs: Sequence[Tensor],
    path: Path,
    *,
    input_names: Sequence[str],
    output_names: Sequence[str],
    graph_name: str,
    card: GraphCard,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write `module` as ONNX in the opset of `card`, traced with `inputs`. Their first dimension is a dynamic batch.

    The batch of `inputs` must be at least 2, because torch treats 1 as a constant. The file appears complete or not at
    all, with the card and the digest of its bytes in its metadata. Weights of more than 2 GB are written to
    `<path>.data`. The names of all nodes begin with `graph_name`, because compilers drop the metadata but keep names.
    `check` is called with the complete file before it is moved to `path`. If `check` raises, nothing is written.
    """
    model = _trace(module, inputs, input_names=input_names, output_names=output_names)
    _lower(model, opset=card.opset)
    _clean(model, graph_name=graph_name)
    model.metadata_props[METADATA_KEY] = card.to_json()
    _write(model, path.resolve(), check=check)


def cast_weights(state: Mapping[str, Tensor], *, dtype: GraphDtype) -> dict[str, Tensor]:
    """The tensors in `dtype` on the CPU. Raises GraphError for numbers that are not finite in `dtype`."""
    cast = {key: tensor.detach().cpu().to(DTYPES[dtype]) for key, tensor in state.items()}
    for key, tensor in cast.items():
        if not bool(torch.isfinite(tensor).all()):
            if bool(torch.isfinite(state[key]).all()):
                raise GraphError(f"Values of `{key}` are too large for float16", hint="export with --dtype float32")
            raise GraphError(f"Values of `{key}` are not finite", hint="the checkpoint is damaged")
    return cast


def _trace(
    module: nn.Module, inputs: Sequence[Tensor], *, input_names: Sequence[str], output_names: Sequence[str]
) -> "onnx_ir.Model":
    batch = torch.export.Dim("batch")
    with _silence():
        program = torch.onnx.export(
            module.eval(),
            tuple(inputs),
            dynamo=True,
            opset_version=_TRACED_OPSET,
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            input_names=list(input_names),
            output_names=list(output_names),
            external_data=False,
            verbose=False,
        )
    if program is None:
        raise AssertionError("torch.onnx.export gave no program")
    model: onnx_ir.Model = program.model
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is None or isinstance(value.shape[0], int):
            raise AssertionError(f"the exported graph is for one batch size only: {value}")
    return model


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the exporter's logs and warnings, which concern other packages and its own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _lower(model: "onnx_ir.Model", *, opset: int) -> None:
    """Change the opset of the graph. All its operators must be the same in both opsets."""
    if opset == _TRACED_OPSET:
        return
    from onnx import defs

    for node in model.graph:
        has_changed = defs.get_schema(node.op_type, _TRACED_OPSET).since_version > opset
        # Split is the same in both opsets if the sizes of its parts are an input.
        if has_changed and (node.op_type != "Split" or "num_outputs" in node.attributes):
            raise AssertionError(f"{node.op_type} of opset {_TRACED_OPSET} has no equal in opset {opset}")
    model.opset_imports[""] = opset


def _clean(model: "onnx_ir.Model", *, graph_name: str) -> None:
    """Remove torch's notes on its sources, which contain paths of this machine, and set names and versions."""
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.name = f"{graph_name}.{node.name}"
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.name = graph_name
    model.ir_version = _IR_VERSION
    model.producer_name, model.producer_version = "llama-adapter", None
    model.metadata_props.clear()


def _write(model: "onnx_ir.Model", target: Path, *, check: Callable[[Path], None] | None) -> None:
    """Write into a temporary folder next to `target`, then rename the files."""
    import onnx_ir

    num_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    weights = f"{target.name}.data" if num_bytes > _MAX_PROTOBUF_BYTES else None
    model.metadata_props[SEAL_KEY] = blank_seal(weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(target) as partial:
        onnx_ir.save(model, partial / target.name, external_data=weights)
        seal(partial / target.name, weights=weights)
        if check is not None:
            check(partial / target.name)
        if weights is not None:
            os.replace(partial / weights, target.parent / weights)
        os.replace(partial / target.name, target)  # the graph comes last, because it makes the export complete
