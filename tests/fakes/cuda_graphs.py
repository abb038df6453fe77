"""Simulates torch's CUDA graphs on the host: operators are recorded while a graph is captured, and run at each replay.

As on the device, nothing is computed during a capture, and the host cannot read a value in it. The output of one graph
may be overwritten when another graph of the same pool runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llama_adapter.runtime import devices
from llama_adapter.runtime.devices.cuda import CUDA, CudaBackend

# Operators that need the host during a capture: its memory, or a value that is not computed yet.
FORBIDDEN = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::lift_fresh", "aten::nonzero")


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def spoil(tensor: Tensor) -> None:
    """Fill the tensor with values that no code should read: NaN, or an id outside every vocabulary."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else -(10**6) if tensor.dtype == torch.int64 else 1)


class Tape(TorchDispatchMode):
    """Records operators in place of running them. Views are created, because they only describe memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in FORBIDDEN:
            raise RuntimeError(f"operation not permitted when stream is capturing ({func.name()})")
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
            return args[0]
        try:
            result = func(*args, **kwargs)
        except IndexError:  # of a place that is not computed yet; only the shape of the result matters here
            result = func(*pytree.tree_map_only(Tensor, _zeros_for_places, args), **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
        outputs = tensors_of(result)
        made = [tensor for tensor in outputs if tensor.untyped_storage().data_ptr() not in given]
        if made:
            self.made += made
            for tensor in made:
                spoil(tensor)

            def again() -> None:
                for held, value in zip(outputs, tensors_of(func(*args, **kwargs)), strict=True):
                    held.copy_(value)

            self.steps.append(again)
        return result


def _zeros_for_places(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.dtype == torch.int64 else tensor


class FakeGraph:
    def __init__(self) -> None:
        self.tape = Tape()
        self.pool: FakePool | None = None

    def replay(self) -> None:
        assert self.pool is not None, "a graph is captured before it is replayed"
        self.pool.num_replays += 1
        for other in self.pool.graphs:
            for tensor in other.tape.made:
                spoil(tensor)
        for step in self.tape.steps:
            step()


class FakePool:
    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.num_replays = 0


class FakeStream:
    def __init__(self) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)


class HostCuda(CudaBackend):
    """The backend of a GPU whose tensors are on the host."""

    def __init__(self) -> None:
        super().__init__(0)
        self.device = torch.device("cpu")

    def mark(self) -> Any:
        return None


class FakeCuda:
    """Records the calls of `torch.cuda`; `install` puts it in place."""

    def __init__(self) -> None:
        self.main = FakeStream()
        self.current = self.main
        self.pools: list[FakePool] = []
        self.warm_up_streams: list[FakeStream] = []
        self.capability = (9, 0)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
        patch.setattr("torch.cuda.Stream", FakeStream)
        patch.setattr("torch.cuda.current_stream", lambda device=None: self.current)
        patch.setattr("torch.cuda.stream", self._stream)
        patch.setattr("torch.cuda.graph_pool_handle", self._new_pool)
        patch.setattr("torch.cuda.CUDAGraph", FakeGraph)
        patch.setattr("torch.cuda.graph", self._graph)
        patch.setattr("torch.cuda.synchronize", lambda device=None: None)

        patch.setattr("torch.cuda.get_device_name", lambda index: "Simulated GPU")
        patch.setattr("torch.cuda.get_device_capability", lambda device: self.capability)
        patch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
        patch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
        patch.setattr("torch.cuda.empty_cache", lambda: None)

    def _new_pool(self) -> FakePool:
        self.pools.append(FakePool())
        return self.pools[-1]

    @contextlib.contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        assert self.main in stream.waited_for, "a side stream waits for what was handed to the main one"
        self.warm_up_streams.append(stream)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _graph(
        self, graph: FakeGraph, *, pool: FakePool, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        assert stream in self.main.waited_for, "a warm-up is over before the capture"
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        graph.pool = pool
        pool.graphs.append(graph)
        with graph.tape:
            yield

    def num_captures(self) -> int:
        return sum(len(pool.graphs) for pool in self.pools)


def install_gpus(patch: pytest.MonkeyPatch, *, count: int = 1) -> FakeCuda:
    """Simulated GPUs are the only accelerators of this machine."""
    fake = FakeCuda()
    fake.install(patch)
    gpu = replace(CUDA, count=lambda: count, open=lambda index: HostCuda())
    patch.setattr(devices, "ACCELERATORS", (gpu,))
    return fake


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake
