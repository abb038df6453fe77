"""NVIDIA GPUs: the backend, the decoder's fused operators, and programs recorded as CUDA graphs.

In half types, steps, products with few bits, rotary embeddings and SwiGLU are Triton kernels (triton_calls.py) on GPUs
that can run them. Everything else is torch's.
"""

# B rows, S step tokens, N heads, H head size

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity

from llama_adapter.runtime.devices.base import Accelerator, Backend, Capabilities, Mark, Program, require_mode
from llama_adapter.runtime.devices.cuda_linear import build_linear, find_triton_fault, has_integer_product
from llama_adapter.runtime.devices.tracing import torch_trace
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.operators import (
    ATEN,
    DecoderSizes,
    Operators,
    fused_adapter_attention,
    fused_causal_attention,
)
from llama_adapter.runtime.schemes import FLOAT, OperatorChoice, Precision
from llama_adapter.runtime.schemes.layers import dequantise_linears, float_type, replace_quantised

CUDA_GRAPH = "cuda_graph"
_NUM_WARM_UPS = 2  # runs before the capture, in which libraries choose kernels and allocate workspaces
_CAPTURING = threading.RLock()  # torch allows one capture at a time in a process, and releases no memory meanwhile


class CudaBackend(Backend):
    """One NVIDIA GPU."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        with torch.cuda.device(self.device):
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        half = ("bfloat16", "float16") if has_bfloat16 else ("float16",)
        # So that float32 is exact: by default, cuDNN rounds the inputs of the patch convolution to TF32.
        torch.backends.cudnn.allow_tf32 = False
        self.capabilities = Capabilities(
            dtypes=(*half, "float32"),
            graph_modes=(CUDA_GRAPH,),
            queued=True,
            collectives="nccl",
            most_rows=256,
        )
        self._capability = torch.cuda.get_device_capability(self.device)
        self._graphs = CudaGraphs(self.device)

    @functools.cached_property
    def triton_fault(self) -> str:
        """Why the Triton kernels cannot run; empty if they can. The first call compiles one."""
        return find_triton_fault(self.device, self._capability)

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event)

    def profiler(self, folder: Path) -> AbstractContextManager[object]:
        return torch_trace(folder, (ProfilerActivity.CPU, ProfilerActivity.CUDA))

    def free_bytes(self) -> int | None:
        self.empty_caches()  # of what earlier models in this process have released
        return torch.cuda.mem_get_info(self.device)[0]

    def empty_caches(self) -> None:
        with _CAPTURING, torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def choose_operators(
        self, sizes: DecoderSizes, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        if wanted == "aten":
            return ATEN
        if dtype == torch.float32:
            return FUSED
        if self.triton_fault:
            note = f"torch computes in place of the Triton kernels, which cannot run here: {self.triton_fault}"
            return dataclasses.replace(FUSED, note=note)
        return triton_operators()

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        dtype = float_type(module)

        def build(linear: nn.Linear, precision: Precision) -> nn.Module | None:
            is_kept = self.computes_in(precision, dtype, wanted=wanted)
            return build_linear(linear, precision, wanted=wanted) if is_kept else None

        replace_quantised(module, build)
        dequantise_linears(module)

    def computes_in(self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        if precision == FLOAT or wanted == "aten":
            return precision == FLOAT
        if wanted == "w8a8" and precision == "int8":
            return self._capability >= (7, 5) and has_integer_product()
        return not self.triton_fault

    def compile(self, program: Program, *, mode: str) -> Program:
        require_mode(mode, backend=self)
        return self._graphs.capture_at_first_call(program)


def open_cuda(index: int) -> CudaBackend:
    """Backend of one GPU. Raises DeviceError if the GPU is listed but cannot compute."""
    try:
        backend = CudaBackend(index)
        torch.ones(1, device=backend.device).add_(1).item()
    except RuntimeError as error:  # the driver, a GPU that this torch has no kernels for, or no free memory
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(
            f"cuda:{index} cannot be opened ({reason})",
            hint="`nvidia-smi` shows its driver and memory; or pass `--device cpu`",
        ) from error
    return backend


CUDA = Accelerator(
    kind="cuda",
    is_installed=lambda: torch.cuda.device_count() > 0,
    count=lambda: torch.cuda.device_count(),
    open=open_cuda,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As one kernel, which computes in float32 internally."""
    return F.rms_norm(x, weight.shape, weight, eps)


def lay_out_rotary(cos_BS1H: Tensor, sin_BS1H: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Put the sign of the rotated half into the sines, once for all layers."""
    first, second = sin_BS1H.chunk(2, dim=-1)
    return cos_BS1H, torch.cat([-first, second], dim=-1)


def rotate(q_BSNH: Tensor, k_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> tuple[Tensor, Tensor]:
    """Computed in float32, because the float32 tables promote half types."""
    return _rotate(q_BSNH, cos_BS1H, sin_BS1H), _rotate(k_BSNH, cos_BS1H, sin_BS1H)


def _rotate(x_BSNH: Tensor, cos_BS1H: Tensor, signed_sin_BS1H: Tensor) -> Tensor:
    turned = x_BSNH.roll(x_BSNH.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BSNH * cos_BS1H, turned.to(cos_BS1H.dtype), signed_sin_BS1H).to(x_BSNH.dtype)


FUSED = dataclasses.replace(
    ATEN,
    name="sdpa",
    rms_norm=rms_norm,
    lay_out_rotary=lay_out_rotary,
    rotate=rotate,
    causal_attention=fused_causal_attention,
    knows_causal=True,
    adapter_attention=fused_adapter_attention,
)


def triton_operators() -> Operators:
    """The operators for half types, with Triton kernels."""
    from llama_adapter.runtime.devices import triton_calls

    def rotate(q_BSNH: Tensor, k_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (triton_calls.rotate(x, cos_BS1H, sin_BS1H) for x in (q_BSNH, k_BSNH))
        return q, k

    return dataclasses.replace(
        FUSED,
        name="triton",
        lay_out_rotary=ATEN.lay_out_rotary,
        rotate=rotate,
        swiglu=triton_calls.swiglu,
        geglu=triton_calls.geglu,
        step=triton_calls.Step(),
    )


class CudaGraphs:
    """The graphs of one device, in one memory pool. They share the memory of inputs and results too.

    torch allows graphs to share memory if they never run at the same time. A result is valid until the next graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._pool: Any = None
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs
        self._inputs: dict[tuple[int, torch.dtype], Tensor] = {}
        self._results: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}

    def capture_at_first_call(self, program: Program) -> Program:
        """`program` as a graph that is captured at its first call; see `Backend.compile`.

        The first dimension of its results must be rows.
        """
        return cast(Program, _Captured(program, graphs=self))

    def capture(self, program: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """The graph of `program` on exactly these tensors, and the tensors that hold its results after a replay."""
        with _CAPTURING, torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if not self._alive:  # torch does not allow captures into a pool whose graphs are all gone
                self._pool = torch.cuda.graph_pool_handle()
            main = torch.cuda.current_stream()
            self._stream.wait_stream(main)
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(_NUM_WARM_UPS):
                        outputs = program(*inputs)
            finally:
                main.wait_stream(self._stream)
            results = tuple(self._result_like(output, index=index) for index, output in enumerate(outputs))
            graph = torch.cuda.CUDAGraph()
            # "thread_local": the capture restricts calls of this thread only, because other threads read pictures.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                for result, output in zip(results, program(*inputs), strict=True):
                    result.copy_(output)
        self._alive.add(graph)
        return graph, results

    def input_like(self, given: Tensor, *, index: int) -> Tensor:
        """A copy of a program's input number `index`, in memory that other graphs use for theirs."""
        kind = index, given.dtype
        if kind not in self._inputs or self._inputs[kind].numel() < given.numel():
            self._inputs[kind] = given.new_empty(given.numel())
        return self._inputs[kind][: given.numel()].view(given.shape).copy_(given)

    def _result_like(self, output: Tensor, *, index: int) -> Tensor:
        """A tensor for an output of this kind, shared by all graphs. Otherwise each graph would hold its own logits."""
        kind = index, output.dtype, tuple(output.shape[1:])
        if kind not in self._results or len(self._results[kind]) < len(output):
            self._results[kind] = torch.empty_like(output)
        return self._results[kind][: len(output)]


class _Captured:
    """One program with fixed shapes and dtypes. Inputs are copied to the tensors that the graph reads."""

    def __init__(self, program: Callable[..., Any], *, graphs: CudaGraphs) -> None:
        self._program, self._graphs = program, graphs
        self._inputs: tuple[Tensor, ...] = ()
        self._graph: Any = None
        self._results: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._graph is None:
            held = tuple(self._graphs.input_like(given, index=index) for index, given in enumerate(inputs))
            self._graph, self._results = self._graphs.capture(self._program, held)
            self._inputs = held
        else:
            for place, given in zip(self._inputs, inputs, strict=True):
                # Copying would convert other types, and repeat rows.
                assert (place.shape, place.dtype) == (given.shape, given.dtype), "a graph has inputs of one form"
                place.copy_(given)
        self._graph.replay()
        return self._results
