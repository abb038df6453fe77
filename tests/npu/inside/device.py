"""The fake NPU as a backend: its properties, memory, marks, and an invalid index."""

import dataclasses
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from llama_adapter.runtime.devices import Backend, npu, open_backend
from llama_adapter.runtime.errors import DeviceError
from tests.npu.inside.host_ops import HostOps


def facts(backend: Backend) -> dict[str, Any]:
    before = backend.free_bytes()
    block = torch.empty(32 << 20, dtype=torch.uint8, device=backend.device)
    after = backend.free_bytes()
    first = backend.mark()
    block.cpu()
    second = backend.mark()
    backend.synchronise()
    del block
    emptied = backend.free_bytes()
    assert first is not None
    assert second is not None
    return {
        "name": backend.name,
        "family": backend.family.name,  # type: ignore[attr-defined]
        "capabilities": dataclasses.asdict(backend.capabilities),
        "taken": None if before is None or after is None else before - after,
        "given_back": None if after is None or emptied is None else emptied - after,
        "elapsed_ms": second.ms_since(first),
        "backwards_ms": first.ms_since(second),
        "too_many": _error(lambda: open_backend("npu:7")),
        "no_graph": _error(lambda: backend.compile(lambda: None, mode="reduce-overhead")),
        "out_of_memory": _error(lambda: torch.empty(64 << 30, dtype=torch.uint8, device=backend.device)),
        "bfloat16": torch.npu.is_bf16_supported(),
        "attention": attention_route(),
    }


def profiled() -> list[str]:
    """The files that torch_npu's profiler writes.

    Runs in a separate process, because profiling slows down all later work.
    """
    backend = open_backend("npu:0")
    with tempfile.TemporaryDirectory() as folder:
        with backend.profiler(Path(folder)), torch.profiler.record_function("stage forward"):
            backend.synchronise()
        return sorted(path.name for path in Path(folder).glob("*_ascend_pt/*"))


def in_a_thread() -> list[int]:
    """The current device of a new thread, and that of a compiled program which it runs."""
    backend, found = open_backend("npu:1"), list[int]()

    def program() -> int:
        return int(torch.npu.current_device())

    with mock.patch.dict(npu.GRAPH_COMPILERS, npugraph_ex=lambda program: program):
        compiled = backend.compile(program, mode="npugraph_ex")
    thread = threading.Thread(target=lambda: found.extend((program(), compiled())))
    thread.start()
    thread.join()
    return found


def attention_route() -> str:
    """The operator that scaled_dot_product_attention with a bool mask calls, or its main parts if there are several."""
    query = torch.zeros(1, 2, 4, 64, dtype=torch.float16).to("npu:0")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).to("npu:0")
    mode = HostOps()
    try:
        with torch.inference_mode(), mode:
            torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    except AssertionError:  # a fused attention for which we have no reference
        pass
    fused = [name for name in mode.sequence if "attention" in name]
    return fused[0] if fused else " + ".join(name for name in mode.sequence if "matmul" in name or "softmax" in name)


def _error(attempt: Any) -> list[str]:
    try:
        attempt()
    except DeviceError as error:
        return [type(error).__name__, error.message, error.hint]
    except Exception as error:
        return [type(error).__name__, str(error), ""]
    return ["", "", ""]
