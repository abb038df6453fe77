"""Which device is taken, and what is said of one that cannot be."""

import pytest

from llama_adapter.llm.runners.shapes import powers_of_two
from llama_adapter.runtime import devices
from llama_adapter.runtime.devices import CpuBackend, accelerator_kind, open_backend, open_best
from llama_adapter.runtime.errors import DeviceError


def test_auto_is_the_cpu_where_nothing_else_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator_kind", lambda: None)

    best, note = open_best()
    assert isinstance(best, CpuBackend)
    assert note == ""


def test_an_accelerator_that_is_installed_and_of_no_use_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(name: str) -> None:
        raise DeviceError(f"{name} sulks", hint="cheer it up")

    monkeypatch.setattr(devices, "accelerator_kind", lambda: "npu")
    monkeypatch.setattr(devices, "open_backend", failing)

    best, note = open_best()
    assert isinstance(best, CpuBackend)
    assert note == "npu:0 sulks; the CPU computes"


def test_the_kind_of_accelerator_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert accelerator_kind() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "torch_npu" else None)
    assert accelerator_kind() == "npu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert accelerator_kind() == "cuda"


@pytest.mark.parametrize("name", ["gpu", "npu:x", "npu0", "cuda:99", "", "cpu:1"])
def test_an_unknown_device_is_told_with_those_there_are(name: str) -> None:
    with pytest.raises(DeviceError, match=f"No device named `{name}`; available: cpu"):
        open_backend(name)


def test_sizes_that_double_end_with_the_limit() -> None:
    assert powers_of_two(1) == (1,)
    assert powers_of_two(8) == (1, 2, 4, 8)
    assert powers_of_two(11) == (1, 2, 4, 8, 11)
