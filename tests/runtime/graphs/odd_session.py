"""A session with faults on request. It does not import torch, so that test processes start quickly."""

import enum
import os
import signal
import time
from collections.abc import Sequence

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.session import GraphInfo, GraphSession


class Odd:
    """A session whose behaviour is selected by the first number of its input."""

    info = GraphInfo(name="odd", file="odd.onnx", inputs=(), outputs=(), card=None, batch_sizes=None, hint="")
    device_ms = None

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        habit = Habit(int(inputs[0].flat[0]))
        if habit is Habit.PRINT:
            os.write(1, b"noise from below\n")
        if habit is Habit.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if habit is Habit.EXIT:
            os._exit(7)
        if habit is Habit.FAIL:
            raise ZeroDivisionError("a fault of the program")
        if habit is Habit.SLEEP:
            time.sleep(0.3)
        return [np.array([habit.value, os.getpid(), os.getsid(0)])]

    def close(self) -> None:
        return


class Habit(enum.IntEnum):
    NONE = 0
    PRINT = 1
    DIE = 2
    EXIT = 3
    FAIL = 4
    SLEEP = 5


def refuses() -> GraphSession:
    raise GraphError("No such encoder", hint="make one")


def given(habit: Habit = Habit.NONE) -> list[np.ndarray]:
    return [np.full((1, 2), habit, dtype=np.uint8)]
