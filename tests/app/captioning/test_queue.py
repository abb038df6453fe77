"""On a device with a queue, a job reads from the device only what was copied to the host in the queue."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.llm.runners import async_readback
from llama_adapter.runtime.devices import transfer
from tests.fakes.cuda_graphs import install_gpus

SAMPLES = sorted(str(path) for path in sample_pictures().glob("*.png"))[:8]
# Methods with which the host waits for the device, unless the tensor is on the host.
WAITING = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__)


class Waits(TorchFunctionMode):
    """Notes the calls that wait, except those on tensors that `copied` put on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_copied = 0
        self._on_host: list[Tensor] = []  # kept alive, so that their memory is not used again

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in WAITING and not any(args[0].data_ptr() == one.data_ptr() for one in self._on_host):
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))

    def copied(self, values: Tensor) -> Tensor:
        self.num_copied += 1
        self._on_host.append(values.clone())
        return self._on_host[-1]


@pytest.mark.parametrize("mode", ["eager", "cuda_graph"])
@pytest.mark.proves("asynchronous read-back", "CUDA")
def test_a_job_never_waits_for_the_device_except_for_the_tokens_of_the_step_before(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpus(monkeypatch)
    waits = Waits()

    def fetch(values: Tensor) -> Callable[[], Tensor]:
        return lambda: waits.copied(values)

    with Captioner.load(device="cpu", dtype="float32") as captioner:
        expected = [(answer.text, answer.unfamiliar) for answer in captioner.generate(SAMPLES)]
    with Captioner.load(device="cuda:0", dtype="float32", mode=mode, batch_size=4) as captioner:
        monkeypatch.setattr(async_readback, "begin_fetch", waits.copied)
        monkeypatch.setattr(transfer, "fetch", fetch)
        with waits:
            answers = captioner.generate(SAMPLES)
            assert torch.ones(1).item() == 1.0  # which the mode sees

    assert [(answer.text, answer.unfamiliar) for answer in answers] == expected
    assert waits.found == ["item"]
    assert waits.num_copied > len(SAMPLES)
