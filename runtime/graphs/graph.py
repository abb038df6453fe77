"""Reads an ONNX file without running it: opset, operators, inputs, outputs and card."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import GraphCard, Port, check_dtypes, find_card
from llama_adapter.runtime.graphs.packages import require

DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node's operator, attributes and number of inputs."""

    domain: str  # empty for ONNX's own
    operator: str
    num_inputs: int
    attributes: Mapping[str, int | None]  # the value if it is an integer, else None

    @property
    def qualified(self) -> str:
        """`LayerNormalization`, `com.microsoft.Gelu`."""
        return f"{self.domain}.{self.operator}" if self.domain else self.operator


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """An ONNX file, without its weights."""

    opset: int  # of ONNX's own operators; 0 if the file does not state it
    nodes: tuple[Node, ...]  # including those inside of other nodes
    inputs: tuple[Port, ...]  # without weights
    outputs: tuple[Port, ...]
    card: GraphCard | None  # None for a graph of another program
    files: tuple[Path, ...]  # the ONNX file, then those of its external weights
    num_bytes: int  # of all files

    @property
    def path(self) -> Path:
        """The ONNX file, as it was named when it was read."""
        return self.files[0]

    @property
    def operators(self) -> Mapping[str, int]:
        """Qualified operator names and how often they occur, most frequent first."""
        return dict(Counter(node.qualified for node in self.nodes).most_common())


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Read an ONNX file. Raises GraphError if it is missing or not ONNX, or if its card is damaged."""
    require("onnx")
    import onnx

    place = Path(path)
    try:
        model = onnx.load(place, load_external_data=False)
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise GraphError(f"The ONNX file `{place}` {reason}", hint="`llama-adapter export onnx` writes one") from None
    except Exception:  # protobuf's DecodeError, among others
        raise _no_onnx(place) from None
    if not model.graph.node:
        raise _no_onnx(place)
    weights = {tensor.name for tensor in model.graph.initializer}
    files = (place, *sorted(_external_files(model, place)))
    inputs = tuple(_port(value) for value in model.graph.input if value.name not in weights)
    outputs = tuple(_port(value) for value in model.graph.output)
    card = find_card({entry.key: entry.value for entry in model.metadata_props}, file=str(place))
    check_dtypes(card, (*inputs, *outputs), file=str(place))
    return Graph(
        opset=next((entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS), 0),
        nodes=tuple(_nodes(model.graph)),
        inputs=inputs,
        outputs=outputs,
        card=card,
        files=files,
        num_bytes=sum(file.stat().st_size for file in files),
    )


def _no_onnx(place: Path) -> GraphError:
    return GraphError(f"`{place}` is no ONNX file, or a damaged one", hint="`llama-adapter export onnx` writes one")


# Classes of the package onnx are typed as Any below, because this module does not import vendor packages
# at import time.


def _nodes(graph: Any) -> Iterator[Node]:
    for node in graph.node:
        yield Node(
            domain="" if node.domain in DEFAULT_DOMAINS else node.domain,
            operator=node.op_type,
            num_inputs=sum(bool(name) for name in node.input),
            attributes={entry.name: entry.i if entry.type == entry.INT else None for entry in node.attribute},
        )
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _port(value: Any) -> Port:
    from onnx import helper

    tensor = value.type.tensor_type
    try:
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, ValueError, TypeError):
        dtype = f"type {tensor.elem_type}"
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    symbols = tuple(dim.dim_param for dim in tensor.shape.dim if not dim.HasField("dim_value"))
    return Port(name=value.name, dtype=dtype, shape=shape, symbols=symbols)


def _external_files(model: Any, place: Path) -> set[Path]:
    names = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return {file for name in names if (file := place.parent / name).is_file()}
