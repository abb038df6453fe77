"""Programs are recorded when their shape occurs for the second time, up to a number of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.devices.programs import GraphMode, RepeatedPrograms
from llama_adapter.runtime.errors import DeviceError

X = torch.tensor([1.0, 2.0])


def double(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2,)


class Recorder(CpuBackend):
    """A device that counts recordings and their calls. The first call of a recording raises what is planned."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = self.num_emptied = 0
        self.failures: list[Exception] = []

    def compile(self, program: Callable[..., Any], *, mode: str) -> Callable[..., Any]:
        assert mode == "recorded"

        def recorded(*inputs: Tensor) -> Any:
            if self.failures:
                raise self.failures.pop()
            self.num_replays += 1
            return program(*inputs)

        self.num_recorded += 1
        return recorded

    def empty_caches(self) -> None:
        self.num_emptied += 1


def programs_of(device: Recorder, **options: int) -> RepeatedPrograms:
    return RepeatedPrograms(GraphMode(device, "recorded"), of="a program", **options)


def shortage() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("keys", "recorded", "replays"),
    [
        (range(10), 0, 0),
        ((*range(10), 7, 7, 3, 7), 2, 4),
        (tuple(range(5)) * 20, 2, 38),  # shapes that occur in turn do not replace each other
    ],
)
def test_shapes_that_occur_again_are_recorded(keys: Sequence[int], recorded: int, replays: int) -> None:
    device = Recorder()
    programs = programs_of(device, most=2)
    for key in keys:
        assert programs.run(key, double, X)[0].tolist() == [2.0, 4.0]

    assert (device.num_recorded, device.num_replays) == (recorded, replays)


def test_a_rarer_shape_makes_room_when_another_has_occurred_twice_as_often() -> None:
    device = Recorder()
    programs = programs_of(device, most=2)
    for key in ("a", "a", "a", "b", "b"):
        programs.run(key, double, X)
    for _ in range(3):  # three of "c" are not twice the two of "b"
        programs.run("c", double, X)
    assert device.num_recorded == 2
    programs.run("c", double, X)
    assert device.num_recorded == 3
    device.num_replays = 0
    for key in ("a", "c", "b"):
        programs.run(key, double, X)

    assert device.num_replays == 2  # of "a" and "c"


def test_counts_of_many_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.runtime.devices.programs._MOST_KEYS", 8)
    programs = programs_of(Recorder())
    for key in ("a", "a", "a", "a", *range(8)):
        programs.run(key, double, X)

    assert programs._counts == {"a": 2}


def test_too_little_memory_for_a_recording_costs_the_recording_alone() -> None:
    device = Recorder()
    programs = programs_of(device)
    device.failures = [shortage()]
    for _ in range(4):
        assert programs.run("a", double, X)[0].tolist() == [2.0, 4.0]

    assert (device.num_recorded, device.num_replays, device.num_emptied) == (1, 0, 1)
    for _ in range(100):
        programs.run("a", double, X)
    assert (device.num_recorded, device.num_replays) == (2, 1)  # memory may be sufficient later


def test_a_failed_recording_replaces_no_other_one() -> None:
    device = Recorder()
    programs = programs_of(device, most=1)
    for _ in range(2):
        programs.run("a", double, X)
    for _ in range(3):
        programs.run("b", double, X)
    device.failures = [shortage()]
    programs.run("b", double, X)
    assert (device.num_recorded, device.num_replays) == (2, 1)
    programs.run("a", double, X)

    assert device.num_replays == 2


@pytest.mark.parametrize(
    "error", [RuntimeError("not permitted when stream is capturing"), ValueError("no kernel\nfor it")]
)
def test_a_program_that_cannot_be_recorded_is_named_and_so_is_a_way_out(error: Exception) -> None:
    device = Recorder()
    programs = programs_of(device)
    programs.run("a", double, X)
    device.failures = [error]
    said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    with pytest.raises(DeviceError, match=rf"^cpu cannot compile a program in mode `recorded` \({said}\)") as caught:
        programs.run("a", double, X)

    assert caught.value.hint == "pass `--mode eager`; `--operators aten` may help too"


@pytest.mark.parametrize(
    ("num_calls", "error"),
    [
        (1, RuntimeError("CUDA error: an illegal memory access was encountered")),
        (1, RuntimeError("ACL stream synchronize failed, error code:507018")),
        (2, ValueError("no number")),
    ],
)
def test_failures_of_the_device_and_of_later_calls_are_no_failures_of_the_mode(
    num_calls: int, error: Exception
) -> None:
    device = Recorder()
    programs = programs_of(device)
    for _ in range(num_calls):
        programs.run("a", double, X)
    device.failures = [error]
    with pytest.raises(type(error), match=str(error)):
        programs.run("a", double, X)
