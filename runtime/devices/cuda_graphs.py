"""Programs recorded as CUDA graphs, which are launched as one instead of kernel by kernel, from one pool of memory."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

CUDA_GRAPH = "cuda_graph"
_NUM_WARM_UPS = 2  # libraries choose their kernels and take their workspaces before anything is recorded

_Program = TypeVar("_Program", bound=Callable[..., Any])


class CudaGraphs:
    """The graphs of one device.

    They share memory, as torch allows for graphs that never run at the same time: what one gives lies where the next
    computes or gives, so results are valid until another graph is launched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._pool: Any = None
        self._results: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}

    def capture_at_first_call(self, program: _Program) -> _Program:
        """A function like `program`, which is run as a graph from its first call on; see `Backend.compile`.

        The program takes tensors and gives a tuple of them, whose first dimension is rows.
        """
        return cast(_Program, _Captured(program, graphs=self))

    def capture(self, program: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """The graph of `program` on these very tensors, and the tensors where its results lie after a replay."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._pool = torch.cuda.graph_pool_handle()
            main = torch.cuda.current_stream()
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                for _ in range(_NUM_WARM_UPS):
                    outputs = program(*inputs)
            main.wait_stream(self._stream)
            results = tuple(self._result_like(output, index=index) for index, output in enumerate(outputs))
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls are held to what a capture allows: pictures are read beside it.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                for result, output in zip(results, program(*inputs), strict=True):
                    result.copy_(output)
        return graph, results

    def _result_like(self, output: Tensor, *, index: int) -> Tensor:
        """Where graphs leave what looks like `output`: one place for all, or each would hold its own logits."""
        kind = index, output.dtype, tuple(output.shape[1:])
        if kind not in self._results or len(self._results[kind]) < len(output):
            self._results[kind] = torch.empty_like(output)
        return self._results[kind][: len(output)]


class _Captured:
    """One program of fixed shapes: inputs are copied to where the graph reads them."""

    def __init__(self, program: Callable[..., Any], *, graphs: CudaGraphs) -> None:
        self._program, self._graphs = program, graphs
        self._inputs: tuple[Tensor, ...] = ()
        self._graph: Any = None
        self._results: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._graph is None:
            held = tuple(given.clone() for given in inputs)
            self._graph, self._results = self._graphs.capture(self._program, held)
            self._inputs = held
        else:
            for place, given in zip(self._inputs, inputs, strict=True):
                place.copy_(given)
        self._graph.replay()
        return self._results
