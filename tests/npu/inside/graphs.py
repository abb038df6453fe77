"""Decode steps as graphs of npugraph_ex: torch_npu's own compiler, with capture and replay acted out on the host.

Operators run where torch_npu captures them, and are noted with their addresses; a replay repeats them on whatever then
stands at those addresses, as the device would. What moved meanwhile is therefore missed here too.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from llm.runtime.backend import open_backend
from tests.npu.inside.host_ops import HostOps, host_view

Tape = list[Callable[[], None]]


class GraphOps(HostOps):
    """Also notes the operators while a graph is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self.num_captures = self.num_replays = 0

    def _run(self, name: str, compute: Callable[[], Any], placed: Callable[[Any], Any]) -> Any:
        result = placed(compute())
        if self.tape is not None:
            assert "_local_scalar_dense" not in name, "the host read a value while a graph was captured"
            self.tape.append(_repeat(compute, result))
        return result


def _repeat(compute: Callable[[], Any], result: Any) -> Callable[[], None]:
    # Views, not tensors: the graph's pool may give the same memory to a later operator, and the replay must not mind.
    views = [host_view(leaf) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(result)]

    def repeat() -> None:
        for view, value in zip(views, pytree.tree_leaves(compute()), strict=True):
            if view is not None and view.data_ptr() != value.data_ptr():
                view.copy_(value)

    return repeat


@contextlib.contextmanager
def acted_out(mode: GraphOps) -> Iterator[None]:
    """Let torch_npu capture and replay through `mode`, and compile without it: torch.compile bears no such mode."""
    from npugraph_ex.npu_fx_compiler import _CompiledFxGraph

    import torch_npu

    graph_class: Any = torch_npu.npu.NPUGraph
    begin, end, call = graph_class.capture_begin, graph_class.capture_end, _CompiledFxGraph.__call__
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

    plain_replay = graph_class.replay
    graph_class.capture_begin, graph_class.capture_end, graph_class.replay = capture_begin, capture_end, replay
    _CompiledFxGraph.__call__ = run_kernel
    try:
        yield
    finally:
        graph_class.capture_begin, graph_class.capture_end, graph_class.replay = begin, end, plain_replay
        _CompiledFxGraph.__call__ = call


def main() -> None:
    backend: Any = open_backend("npu:0")
    from tests.npu.inside import decoder

    plain_compile = type(backend).compile

    def compile_without_modes(self: Any, program: Any, *, mode: str) -> Any:
        compiled = plain_compile(self, program, mode=mode)

        def run(*args: Tensor) -> Tensor:
            with _disable_current_modes():
                result: Tensor = compiled(*args)
            return result

        return run

    type(backend).compile = compile_without_modes
    report: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    for mode_name in ("npugraph_ex", "acl_graph"):
        torch._dynamo.reset()
        mode = GraphOps()
        with acted_out(mode), mode:
            graph = decoder.results(decoder.FUSED, backend, dtype=torch.float32, mode=mode_name)
        with HostOps():
            eager = decoder.results(decoder.FUSED, backend, dtype=torch.float32)
        report[mode_name] = {
            "graph": graph,
            "eager": eager,
            "captures": mode.num_captures,
            "replays": mode.num_replays,
            "calls": mode.calls,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
