"""The device that a name selects, the error if it is unavailable, and the packed linear layers of the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from llama_adapter.llm.runners.shapes import powers_of_two
from llama_adapter.runtime import devices
from llama_adapter.runtime.devices import (
    Backend,
    Capabilities,
    CpuBackend,
    accelerator_kind,
    cpu,
    open_backend,
    open_best,
    settle_mode,
)
from llama_adapter.runtime.devices.base import Accelerator
from llama_adapter.runtime.devices.cpu import PackedLinear, can_pack, pack_linears
from llama_adapter.runtime.errors import DeviceError
from tests.bounds import sums, unit
from tests.llm.toys import toy_decoder


def test_auto_is_the_first_accelerator_that_opens_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def sulk(index: int) -> Backend:
        raise DeviceError(f"first:{index} sulks", hint="cheer it up")

    backend: Any = SimpleNamespace(name="second:0")
    absent = Accelerator(kind="absent", is_installed=lambda: False, count=lambda: 0, open=sulk)
    first = Accelerator(kind="first", is_installed=lambda: True, count=lambda: 1, open=sulk)
    second = Accelerator(kind="second", is_installed=lambda: True, count=lambda: 1, open=lambda index: backend)
    found = []
    for accelerators in ((absent,), (absent, first), (first, second)):
        monkeypatch.setattr(devices, "ACCELERATORS", accelerators)
        best, why = open_best()
        found.append((best.name, why))

    assert found == [
        ("cpu", "no accelerator is installed"),
        ("cpu", "first:0 sulks"),
        ("second:0", "first:0 sulks; the first accelerator"),
    ]


def test_a_gpu_that_does_not_compute_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> str:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", fail)
    with pytest.raises(DeviceError) as caught:
        open_backend("cuda:0")

    assert "no kernel image is available)" in caught.value.message


def test_an_accelerator_is_an_entry_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Accelerator(kind="toy", is_installed=lambda: True, count=lambda: 2, open=lambda index: f"toy {index}")
    monkeypatch.setattr(devices, "ACCELERATORS", (toy,))

    assert [open_backend(name) for name in ("toy", "toy:1", "auto")] == ["toy 0", "toy 1", "toy 0"]
    with pytest.raises(DeviceError, match="available: cpu, toy:0, toy:1"):
        open_backend("toy:2")


def test_the_kind_of_accelerator_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert accelerator_kind() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "torch_npu" else None)
    assert accelerator_kind() == "npu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert accelerator_kind() == "npu"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert accelerator_kind() == "cuda"


@pytest.mark.parametrize(
    ("graph_modes", "static_shapes", "num_ranks", "expected"),
    [
        (("recorded", "other"), False, 1, "recorded"),
        (("recorded",), False, 2, "eager"),  # no graph holds the sums over ranks
        (("compiled",), True, 1, "eager"),  # each shape would be compiled first
        ((), False, 1, "eager"),
    ],
)
def test_auto_is_the_mode_of_graphs_that_are_recorded_quickly(
    graph_modes: tuple[str, ...], static_shapes: bool, num_ranks: int, expected: str
) -> None:
    has = Capabilities(dtypes=("float32",), graph_modes=graph_modes, static_shapes=static_shapes)
    backend: Any = SimpleNamespace(name="toy:0", capabilities=has)

    assert settle_mode("auto", backend=backend, num_ranks=num_ranks) == (expected, "")
    for mode in ("eager", *graph_modes):
        assert settle_mode(mode, backend=backend) == (mode, "")
    if graph_modes:
        assert settle_mode("graph", backend=backend) == (graph_modes[0], "")


def test_a_graph_mode_that_cannot_run_becomes_eager_unless_it_is_strict() -> None:
    has = Capabilities(dtypes=("float32",), graph_modes=("recorded",))
    backend: Any = SimpleNamespace(name="toy:0", capabilities=has)

    mode, note = settle_mode("ge_graph", backend=backend)
    assert (mode, note) == ("eager", "steps run eager: toy:0 has no mode `ge_graph`")
    mode, note = settle_mode("recorded", backend=backend, num_ranks=2)
    assert (mode, "no graph holds the sums over 2 ranks" in note) == ("eager", True)
    for name, strict in (("ge_graph", True), ("bananas", False)):
        with pytest.raises(DeviceError, match=f"toy:0 has no mode `{name}`") as caught:
            settle_mode(name, backend=backend, strict=strict)
        assert "eager, recorded" in caught.value.hint


@pytest.mark.parametrize("name", ["gpu", "npu:x", "npu0", "cuda:99", "", "cpu:1", "npu:"])
def test_an_unknown_device_is_an_error_that_lists_the_others(name: str) -> None:
    with pytest.raises(DeviceError, match=f"No device named `{name}`; available: cpu"):
        open_backend(name)


@pytest.mark.parametrize(
    ("precision", "activations", "wanted", "has_kernels", "expected"),
    [
        ("float", torch.float16, "aten", False, True),
        ("int8", torch.float32, "auto", True, True),
        ("int8", torch.bfloat16, "auto", True, True),
        ("int8", torch.float16, "auto", True, False),
        ("int8", torch.float32, "aten", True, False),
        ("int8", torch.float32, "auto", False, False),
    ],
)
def test_the_cpu_computes_quantised_weights_by_the_kernels_alone(
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    activations: torch.dtype,
    wanted: str,
    has_kernels: bool,
    expected: bool,
) -> None:
    library = SimpleNamespace(takes=lambda dtype: dtype == torch.int8) if has_kernels else None
    monkeypatch.setattr(cpu, "find_library", lambda: SimpleNamespace(library=library))

    assert CpuBackend().computes_in(precision, activations, wanted=wanted) == expected


def test_sizes_that_double_end_with_the_limit() -> None:
    assert powers_of_two(1) == (1,)
    assert powers_of_two(8) == (1, 2, 4, 8)
    assert powers_of_two(11) == (1, 2, 4, 8, 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 7, 48), (3, 1, 48), (0, 48)])
def test_a_packed_layer_equals_the_layer_it_is_made_of(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this machine's oneDNN does not compute in {dtype}")
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype)

    ours, expected = PackedLinear(linear)(x), linear(x)

    assert ours.dtype == dtype
    assert ours.shape == expected.shape
    results = 0.0 if dtype == torch.float32 else 2 * unit(dtype) * expected.double().abs()
    limit = sums(x, linear.weight, linear.bias) + results
    assert bool(((ours.double() - expected.double()).abs() <= limit).all())


def test_only_supported_linear_layers_are_packed() -> None:
    decoder = toy_decoder()
    head, x = decoder.head, torch.randn(decoder.head.in_features, 6).T  # not contiguous
    assert bool(((PackedLinear(head)(x) - head(x)).abs() <= sums(x, head.weight, head.bias)).all())
    embedding, double = decoder.embedding, nn.Linear(4, 4, dtype=torch.float64)

    pack_linears(decoder)
    pack_linears(left := nn.Sequential(double))
    assert not any(isinstance(module, nn.Linear) for module in decoder.modules())
    assert decoder.embedding is embedding
    assert left[0] is double
