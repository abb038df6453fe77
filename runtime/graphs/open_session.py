"""Opens a graph from a description in plain values: chooses the session for the kind of file."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

from llama_adapter.runtime.graphs.om_session import OmSession
from llama_adapter.runtime.graphs.onnx_provider import CPU, OnnxProvider
from llama_adapter.runtime.graphs.onnx_session import OnnxSession
from llama_adapter.runtime.graphs.process_session import ProcessSession
from llama_adapter.runtime.graphs.session import GraphSession
from llama_adapter.runtime.host_cpus import default_threads

GraphKind = Literal["onnx", "om"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSpec:
    """A graph and how to run it. It can be pickled and printed."""

    kind: GraphKind
    path: str  # a file; for om also a folder with files for several batch sizes
    device_id: int = 0  # for om, 0 to 255, counted within ASCEND_RT_VISIBLE_DEVICES
    provider: OnnxProvider = CPU  # for onnx
    threads: int | None = None  # for onnx, at least 1; None: as many as torch uses
    own_process: bool = False  # run the graph in a separate process


def open_session(spec: GraphSpec) -> GraphSession:
    """Load and check the graph of `spec`, without a warm-up. Raises GraphError."""
    if spec.own_process:
        # A new process does not know how many threads this process may use.
        here = dataclasses.replace(spec, own_process=False, threads=spec.threads or default_threads())
        return ProcessSession(functools.partial(open_session, here), file=spec.path)
    if spec.kind == "onnx":
        return OnnxSession(spec.path, threads=spec.threads or default_threads(), provider=spec.provider)
    return OmSession(spec.path, device_id=spec.device_id)
