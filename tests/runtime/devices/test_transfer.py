"""Copies to and from a GPU go into its queue from and to pinned memory, and only reading a result waits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from llama_adapter.runtime.devices.transfer import fetch, upload

ANY_TENSOR: Any = Tensor
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class OnGpu(TorchFunctionMode):
    """Says that every tensor is on a GPU, and notes how tensors are copied. All of them stay on the host."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function == ANY_TENSOR.device.__get__:
            return GPU
        if function is Tensor.pin_memory:
            self.calls.append("pin")
            return args[0]
        if function is Tensor.to:
            self.calls.append(f"to {args[1]}, non_blocking {kwargs.get('non_blocking', False)}")
            return args[0]
        if function is Tensor.copy_:
            self.calls.append(f"copy, non_blocking {kwargs.get('non_blocking', False)}")
        if function is torch.empty_like:
            self.calls.append(f"{kwargs.pop('device')} memory, pinned {kwargs.pop('pin_memory')}")
        return function(*args, **kwargs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            calls.append(f"record on {stream}")

        def synchronize(self) -> None:
            calls.append("wait")

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"the stream of {device}")
    return calls


@pytest.mark.proves("asynchronous read-back", "CUDA")
def test_a_copy_to_the_host_is_waited_for_when_it_is_read(calls: list[str]) -> None:
    values = torch.tensor([1.0, 2.0])
    with OnGpu(calls):
        found = fetch(values)
    assert calls == ["cpu memory, pinned True", "copy, non_blocking True", "record on the stream of cuda:0"]

    assert found().tolist() == [1.0, 2.0]
    assert calls[3:] == ["wait"]
    assert fetch(values)().tolist() == [1.0, 2.0]
    assert len(calls) == 4  # on the host, nothing is copied


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([0.5, 1e300], torch.tensor([0.5, torch.inf])),
        (np.array([0.5]), torch.tensor([0.5])),
        (np.array([1], np.uint8), torch.tensor([1], dtype=torch.uint8)),
    ],
)
def test_numbers_have_the_dtype_that_models_compute_in(values: Any, expected: Tensor) -> None:
    assert_close(upload(values, CPU), expected, rtol=0, atol=0)


@pytest.mark.parametrize("values", [[1, 2], np.array([1, 2])])
def test_a_copy_to_the_device_is_not_waited_for(values: Any, calls: list[str]) -> None:
    with OnGpu(calls):
        assert upload(values, GPU).tolist() == [1, 2]
    assert calls == ["pin", "to cuda:0, non_blocking True"]
    assert upload(values, CPU).tolist() == [1, 2]
