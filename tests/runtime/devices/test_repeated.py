"""Programs are recorded when their shape occurs for the second time, up to a number of them."""

from torch import Tensor

from llama_adapter.runtime.devices.repeated import RepeatedPrograms, TensorProgram


def program() -> tuple[Tensor, ...]:
    return ()


def test_shapes_that_occur_once_take_no_place_of_those_that_occur_again() -> None:
    recorded: list[TensorProgram] = []

    def record(plain: TensorProgram) -> TensorProgram:
        recorded.append(lambda: plain())
        return recorded[-1]

    programs = RepeatedPrograms(record, most=2)
    for key in range(10):
        assert programs.find(key, program) is program
    for key in (7, 7, 3, 7):
        assert programs.find(key, program) in recorded

    assert len(recorded) == 2
    assert programs.find(5, program) is program  # there is no place left
    assert programs.find(3, program) is recorded[1]
