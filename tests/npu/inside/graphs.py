"""Decode steps as graphs of npugraph_ex: torch_npu's own compiler, with capture and replay simulated on the host.

Operators that torch_npu captures are recorded with their addresses. A replay runs them on the current content of these
addresses, as the device would. So a tensor that moves after the capture is missed, as on the device.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.operators import DecoderSizes, Operators
from tests.npu.inside import decoder, few_bits
from tests.npu.inside.host_ops import HostOps, host_view

MODE = "npugraph_ex"
Tape = list[Callable[[], None]]


class GraphOps(HostOps):
    """While a graph is captured, operators are recorded and not run, as on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self.num_captures = self.num_replays = 0
        self._noted: Callable[[], Any] | None = None

    def _run(self, func: OpOverload, compute: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        if self.tape is None:
            return super()._run(func, compute, args, kwargs)
        self._noted = compute
        return _unwritten(func, args, kwargs)

    def _placed(self, result: Any) -> Any:
        if self._noted is not None and self.tape is not None:
            self.tape.append(_repeat(self._noted, result))
            self._noted = None
        return result


def _unwritten(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Results with the right shapes that are not computed.

    If an operator returns one of its arguments, the result is that argument.
    """
    hosts: dict[int, Tensor] = {}

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf
        sketch = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        hosts[id(sketch)] = leaf
        return sketch

    result = func(*pytree.tree_map(to_meta, args), **pytree.tree_map(to_meta, kwargs))

    def to_host(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in hosts:
            return hosts[id(leaf)]
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)

    return pytree.tree_map(to_host, result)


def _repeat(compute: Callable[[], Any], result: Any) -> Callable[[], None]:
    # Views, not tensors, are kept: the graph's pool may reuse the memory for a later operator, and the replay must
    # allow this.
    views = [host_view(leaf) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(result)]

    def repeat() -> None:
        for view, value in zip(views, pytree.tree_leaves(compute()), strict=True):
            if view is not None and view.data_ptr() != value.data_ptr():
                view.copy_(value)

    return repeat


@contextlib.contextmanager
def acted_out(mode: GraphOps) -> Iterator[None]:
    """Let torch_npu capture and replay with `mode`, but compile without it. torch.compile cannot run in such a mode."""
    graph_class: Any = importlib.import_module("torch_npu").npu.NPUGraph
    compiler: Any = importlib.import_module("npugraph_ex").get_npu_backend().func  # the attribute access imports it
    kernel: Any = compiler.__globals__["_CompiledFxGraph"]
    begin, end, plain_replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay
    call = kernel.__call__
    tapes: dict[int, Tape] = {}

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        mode.tape = tapes[id(graph)] = []
        mode.num_captures += 1

    def capture_end(graph: Any) -> None:
        mode.tape = None
        end(graph)

    def replay(graph: Any) -> None:
        mode.num_replays += 1
        for repeat in tapes[id(graph)]:
            repeat()

    def run_kernel(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return call(compiled, *args, **kwargs)

    graph_class.capture_begin, graph_class.capture_end, graph_class.replay = capture_begin, capture_end, replay
    kernel.__call__ = run_kernel
    try:
        yield
    finally:
        graph_class.capture_begin, graph_class.capture_end, graph_class.replay = begin, end, plain_replay
        kernel.__call__ = call


def comparisons() -> dict[str, Any]:
    """Answers with and without graphs, in float32, and in 4 bits with a head in float16.

    Each number of rows compiles for seconds, so in 4 bits there are two rows at most.
    In float32, eager steps run as users run them. In 4 bits, they use the operators of graphs, because in half
    precision the fused rotation of eager steps rounds elsewhere.
    """
    backend: Any = open_backend("npu:0")
    backend_class = type(backend)
    plain_choose, plain_compile = backend_class.choose_operators, backend_class.compile

    def choose_as_in_graphs(self: Any, sizes: DecoderSizes, *, mode: str, **how: Any) -> Operators:
        operators: Operators = plain_choose(self, sizes, mode=MODE, **how)
        return operators

    def compile_without_modes(self: Any, program: Any, *, mode: str) -> Any:
        compiled = plain_compile(self, program, mode=mode)

        def run(*args: Tensor) -> Tensor:
            with _disable_current_modes():
                result: Tensor = compiled(*args)
            return result

        return run

    backend_class.compile = compile_without_modes
    warnings.simplefilter("ignore")
    found = {"float32": _comparison(backend, decoder.FUSED, dtype=torch.float32)}
    backend_class.choose_operators = choose_as_in_graphs
    short = {"num_requests": 2, "num_tokens": 6}
    found["int4"] = _comparison(backend, few_bits.CONFIG, dtype=torch.float16, precision="int4", **short)
    return found


def _comparison(backend: Any, config: DecoderConfig, **how: Any) -> dict[str, Any]:
    mode = GraphOps()
    with acted_out(mode), mode:
        graph = decoder.results(config, backend, mode=MODE, **how)
    with HostOps():
        eager = decoder.results(config, backend, **how)
    return {
        "graph": graph,
        "eager": eager,
        "captures": mode.num_captures,
        "replays": mode.num_replays,
        "calls": mode.calls,
    }
