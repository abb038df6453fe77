"""MindIR files: writes MindSpore cells as graphs that share one weight file, and reads descriptions of such graphs."""

import contextlib
import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.graphs.card import METADATA_KEY, GraphCard, Port, find_card
from llama_adapter.runtime.graphs.packages import import_package
from llama_adapter.runtime.text import one_line

PORTS_KEY: Final = "llama_adapter_ports"  # key in a file's user_info: the names of inputs and outputs
HINT: Final = "export the model again with `llama-adapter export decoder --format mindir`"
_DTYPES: Final = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}


class External(NamedTuple):
    """Where a tensor's bytes are. `location` is a file's path relative to the graph's folder, and inside it."""

    location: str
    offset: int
    length: int


def weights_header() -> bytes:
    """The first 64 bytes of a weight file: whether it is little-endian, and zeros."""
    return bytes([sys.byteorder == "little"]).ljust(64, b"\0")


def import_mindspore() -> Any:
    """The package `mindspore`. Raises GraphError if it is missing or cannot be imported."""
    os.environ.setdefault("GLOG_v", "3")  # errors only: warnings have no consequence here
    return import_package("mindspore", hint=install_hint("mindspore"))


def write_mindir(
    cell: Any,
    path: Path,
    *,
    inputs: Sequence[Port],
    outputs: Sequence[str],
    weights: Mapping[str, External],
    card: GraphCard | None = None,
) -> None:
    """Write the graph of a cell whose parameters have no values. `weights` locates the values of each parameter.

    Raises GraphError if MindSpore cannot compile the cell.
    """
    mindspore = import_mindspore()
    placeholders = [open_tensor(mindspore, port) for port in inputs]

    def finish(model: Any) -> None:
        for parameter in model.graph.parameter:
            external, place = parameter.external_data, weights[parameter.name.partition(":")[2]]
            external.location, external.offset, external.length = place
        model.user_info[PORTS_KEY] = json.dumps([[port.name for port in inputs], list(outputs)])
        if card is not None:
            model.user_info[METADATA_KEY] = card.to_json()
        with atomic_write(path) as file:
            file.write(model.SerializeToString())
        del model.graph.parameter[:]  # or the exporter would look for their values

    with graph_mode(mindspore), tempfile.TemporaryDirectory() as folder:
        try:
            # The exporter's own file is discarded, because it would store the weights again for every graph.
            mindspore.export(cell, *placeholders, file_name=f"{folder}/graph", file_format="MINDIR", custom_func=finish)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise GraphError(f"MindSpore cannot export the graph: {one_line(str(error))}") from error


def open_tensor(mindspore: Any, port: Port) -> Any:
    """A tensor without values that stands for a port, with the same dynamic sizes."""
    dtype = getattr(mindspore, "bool_" if port.dtype == "bool" else port.dtype)
    return mindspore.Tensor(shape=[None if size < 0 else size for size in port.shape], dtype=dtype)


@contextlib.contextmanager
def graph_mode(mindspore: Any) -> Iterator[None]:
    """Let MindSpore compile graphs inside this context, and keep its warnings from stderr."""
    before, logger = mindspore.get_context("mode"), logging.getLogger("MindSpore")
    level = logger.level
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        mindspore.set_context(mode=before)


@dataclass(frozen=True, kw_only=True, slots=True)
class MindirFile:
    """The description in a MindIR file: its inputs, its outputs and its card."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    card: GraphCard | None


def read_mindir(path: Path) -> MindirFile:
    """Read a MindIR file without its weights.

    Raises GraphError if the file or one of its weight files is missing or damaged.
    """
    import_mindspore()
    proto = importlib.import_module("mindspore.train.mind_ir_pb2")
    model = proto.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise GraphError(f"The MindIR file `{path}` {reason}", hint=HINT) from None
    except Exception:  # protobuf's DecodeError
        raise _no_mindir(path) from None
    if not model.graph.node:
        raise _no_mindir(path)
    _check_weights(model, path)
    names = _port_names(model, path)
    inputs = [_port(value.tensor[0]) for value in model.graph.input if value.tensor]
    outputs = [_port(tensor) for value in model.graph.output for tensor in _tensors(value)]
    if len(inputs) != len(model.graph.input) or (
        names and (len(names[0]), len(names[1])) != (len(inputs), len(outputs))
    ):
        raise _no_mindir(path)
    if not names:
        names = (
            [value.name.rpartition(":")[2] for value in model.graph.input],
            [f"output{number}" for number in range(len(outputs))],
        )
    return MindirFile(
        inputs=tuple(replace(port, name=name) for port, name in zip(inputs, names[0], strict=True)),
        outputs=tuple(replace(port, name=name) for port, name in zip(outputs, names[1], strict=True)),
        card=find_card(dict(model.user_info), file=str(path)),
    )


def _check_weights(model: Any, path: Path) -> None:
    """Raise GraphError unless the weight files are complete.

    MindSpore ends the process if it reads beyond their end.
    """
    ends: dict[str, int] = {}
    for parameter in model.graph.parameter:
        external = parameter.external_data
        if external.location:
            ends[external.location] = max(ends.get(external.location, 0), external.offset + external.length)
    for location, end in ends.items():
        file = path.parent / location
        if os.path.isabs(location) or ".." in Path(location).parts:
            raise GraphError(f"`{path}` names weights outside of its folder: {location!a}", hint=HINT)
        if not file.is_file():
            raise GraphError(
                f"`{path}` has its weights in `{file}`, which does not exist", hint="copy the whole folder"
            )
        if file.stat().st_size < end:
            raise GraphError(
                f"`{file}` ends before the weights of `{path.name}` do", hint="copy the whole folder again"
            )


def _port_names(model: Any, path: Path) -> tuple[list[str], list[str]] | None:
    if PORTS_KEY not in model.user_info:
        return None
    try:
        inputs, outputs = json.loads(model.user_info[PORTS_KEY])
    except ValueError:
        raise _no_mindir(path) from None
    return [str(name) for name in inputs], [str(name) for name in outputs]


def _no_mindir(path: Path) -> GraphError:
    return GraphError(f"`{path}` is no MindIR file, or a damaged one", hint=HINT)


def _tensors(value: Any) -> list[Any]:
    """The tensors of an output, which may be a tuple of several."""
    if value.tensor:
        return list(value.tensor)
    return [entry.tensors[0] for entry in value.attr_info.values if entry.tensors]


def _port(tensor: Any) -> Port:
    dtype = _DTYPES.get(tensor.data_type, f"type {tensor.data_type}")
    return Port(dtype=dtype, shape=tuple(int(size) for size in tensor.dims))
