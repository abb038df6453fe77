"""Running an exported graph: the protocol of all sessions, and their common checks."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import GraphCard, Port


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphInfo:
    """The description of a loaded graph. The first dimension of all inputs and outputs is the batch."""

    name: str  # the runtime and its device, such as `onnxruntime (CPUExecutionProvider)`
    file: str  # or a folder with files for several batch sizes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    card: GraphCard | None = None  # None for a file of another program
    batch_sizes: tuple[int, ...] | None = None  # the batch sizes it was compiled for, ascending; None if it accepts any
    hint: str  # how to create such a file, for error messages


class GraphSession(Protocol):
    """A graph that is loaded, checked and ready to run."""

    @property
    def info(self) -> GraphInfo: ...

    @property
    def device_ms(self) -> float | None:
        """Milliseconds that the last `run` took on the device; None if they are not measured."""

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One array per input, with any batch of at least 1 -> one array per output.

        Inputs are cast to the graph's types. Raises GraphError if the graph or its runtime fails.
        """

    def close(self) -> None:
        """Release memory, device, thread and process. May be repeated."""


def as_inputs(arrays: Sequence[np.ndarray], ports: Sequence[Port]) -> list[np.ndarray]:
    """The arrays in the types of their ports, contiguous in C order."""
    return [np.ascontiguousarray(array, dtype=port.dtype) for array, port in zip(arrays, ports, strict=True)]


def check_outputs(outputs: Sequence[np.ndarray], ports: Sequence[Port], *, batch: int, file: str) -> None:
    """Raise GraphError unless the outputs of a run have the shapes and types that the graph declares for this batch."""
    for output, port in zip(outputs, ports, strict=True):
        promised = Port(name=port.name, dtype=port.dtype, shape=(batch, *port.shape[1:]))
        if not promised.fits(Port.of(output)):
            raise GraphError(
                f"`{file}` promises {promised} for a batch of {batch}, and gave {Port.of(output)}",
                hint="the file, or the runtime under it, is damaged: export the model again",
            )


def check_fixed_batch(ports: Sequence[Port], *, file: str, hint: str) -> None:
    """Raise GraphError for a fixed batch of 0, and for a batch whose inputs alone exceed this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for port in ports:
        if not port.shape:
            continue
        if not port.shape[0]:
            raise GraphError(f"`{file}` takes {port}, an empty batch", hint=hint)
        num_bytes = math.prod(port.shape) * (1 + _itemsize(port))  # as passed, and in the graph's type
        if port.shape[0] > 0 and num_bytes > memory:
            raise GraphError(
                f"`{file}` was compiled for a batch of {port.shape[0]:,}, whose inputs alone take "
                f"{num_bytes / 1e9:,.1f} GB of the {memory / 1e9:,.1f} GB here",
                hint=f"make it again for a smaller batch: {hint}",
            )


def _itemsize(port: Port) -> int:
    try:
        return np.dtype(port.dtype).itemsize
    except TypeError:  # a type that numpy does not have
        return 1


def check_owner(process: int, *, file: str) -> None:
    """Raise GraphError unless this is the process that opened the session.

    Only this process has the session's threads and gets its replies.
    """
    if os.getpid() != process:
        raise GraphError(
            f"`{file}` was opened by the process that this one was forked from",
            hint="open it in each process that uses it",
        )


def closed_error(file: str) -> GraphError:
    """The error for running a session after `close`."""
    return GraphError(f"`{file}` was closed and cannot run any more")
