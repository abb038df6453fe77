"""A graph in a process of its own: the same numbers and errors, and neither side takes the other down."""

import enum
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.open_session import GraphSpec
from llama_adapter.runtime.graphs.process_session import ProcessSession
from llama_adapter.runtime.graphs.session import GraphInfo, GraphSession
from tests.fakes.exported import embedded_onnx, make_om, open_om, open_onnx, sample_pixels
from tests.fakes.foreign_onnx import foreign_onnx

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


class Odd:
    """A session whose habit is the first number it is given."""

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


@pytest.fixture(scope="module")
def odd() -> Iterator[ProcessSession]:
    """One for all tests that leave it alive: a start takes seconds."""
    with closing(ProcessSession(Odd, file="odd.onnx")) as backend:
        yield backend


def test_it_gives_what_the_same_session_gives_here() -> None:
    here = open_onnx(embedded_onnx(), threads=1)
    with closing(open_onnx(embedded_onnx(), threads=1, own_process=True)) as apart:
        assert torch.equal(apart.encode(sample_pixels()[:3]), here.encode(sample_pixels()[:3]))
        assert (apart.card, apart.batch_sizes, apart.image_size) == (here.card, here.batch_sizes, here.image_size)
        assert apart.name == "onnxruntime (CPUExecutionProvider), own process"


def test_an_om_runs_there_too_and_its_time_is_known_here(acl: Any, tmp_path: Path) -> None:
    with closing(open_om(make_om(tmp_path / "clip.om", [1, 4]), own_process=True)) as apart:
        assert len(apart.encode(sample_pixels()[:5])) == 5
        assert apart.device_ms is not None
    assert acl.RECORD.loaded == 0


def test_an_encoder_that_cannot_be_opened_there_is_the_same_error_here() -> None:
    with pytest.raises(GraphError, match=r"^No such encoder$") as caught:
        ProcessSession(refuses, file="odd.onnx")
    assert caught.value.hint == "make one"


@pytest.mark.parametrize(("habit", "how"), [("DIE", "by SIGKILL"), ("EXIT", "with exit code 7")])
def test_a_process_that_ended_is_an_error_and_not_a_wait(habit: str, how: str) -> None:
    with closing(ProcessSession(Odd, file="odd.onnx")) as backend:
        for _ in range(2):
            with pytest.raises(GraphError, match=rf"`odd\.onnx` was ended {how}") as caught:
                backend.run(given(Habit[habit]))
            assert ("memory" in caught.value.hint) == (habit == "DIE")


def test_a_fault_of_the_program_keeps_its_traceback_and_the_process_goes_on(odd: ProcessSession) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)odd\.onnx` failed.*Traceback.*ZeroDivisionError: a fault"):
        odd.run(given(Habit.FAIL))
    assert odd.run(given())


def test_a_reply_to_a_call_that_was_interrupted_is_not_taken_for_the_next(
    odd: ProcessSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = odd._receive

    def interrupt(kind: type[Any]) -> Any:
        monkeypatch.setattr(odd, "_receive", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(odd, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        odd.run(given(Habit.SLEEP))
    assert odd.run(given())[0][0] == Habit.NONE


class Cut:
    """A connection whose next message is interrupted half-way, in one of its directions."""

    def __init__(self, connection: Any, *, direction: str) -> None:
        self._connection, self._direction = connection, direction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send_bytes(self, data: bytes) -> None:
        if self._direction == "send":
            os.write(self._connection.fileno(), struct.pack("!i", len(data)) + data[: len(data) // 2])
            raise KeyboardInterrupt
        self._connection.send_bytes(data)

    def recv(self) -> Any:
        os.read(self._connection.fileno(), 6)
        raise KeyboardInterrupt


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_message_cut_in_two_ends_the_process_and_the_next_call_says_so(
    direction: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(ProcessSession(Odd, file="odd.onnx")) as backend:
        monkeypatch.setattr(backend, "_connection", Cut(backend._connection, direction=direction))

        with pytest.raises(KeyboardInterrupt):
            backend.run(given())

        assert backend._child.process.returncode == -signal.SIGKILL
        for _ in range(2):
            with pytest.raises(
                GraphError, match=r"`odd\.onnx` was ended, because a message .* was interrupted"
            ) as caught:
                backend.run(given())
            assert caught.value.hint == "open it again"
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_while_a_reply_is_waited_for_leaves_the_process_alone(odd: ProcessSession) -> None:
    _, before, _ = odd.run(given())[0].tolist()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            odd.run(given(Habit.SLEEP))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    habit, after, _ = odd.run(given())[0].tolist()
    assert (habit, after) == (Habit.NONE, before)


def test_it_is_out_of_reach_of_the_terminals_signals(odd: ProcessSession) -> None:
    _, process, session = odd.run(given())[0].tolist()
    assert process == session != os.getsid(0)


def test_closing_ends_it_and_leaves_no_zombie(capfd: pytest.CaptureFixture[str]) -> None:
    backend = ProcessSession(Odd, file="odd.onnx")
    backend.run(given(Habit.PRINT))
    for _ in range(2):
        backend.close()
    assert backend._child.process.returncode == 0
    assert capfd.readouterr() == ("", "noise from below\n")  # and what it prints does not get among our data
    with pytest.raises(GraphError, match="was closed"):
        backend.run(given())


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    code = f"""
import os, signal
from llama_adapter.runtime.graphs.open_session import GraphSpec, open_session
session = open_session(GraphSpec(kind="onnx", path={str(file)!r}, own_process=True))
print(session._child.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(result.stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and is_running(child):
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process: int) -> bool:
    """False for one that has ended and that nobody has asked about."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_script_without_a_main_guard_may_use_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from llama_adapter.runtime.graphs.open_session import GraphSpec, open_session

session = open_session(GraphSpec(kind="onnx", path={str(file)!r}, own_process=True))
print(session.run([np.full((1, 2, 2, 3), 7, dtype=np.uint8)])[0][0, 0, 0])
"""
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("7.0\n", "")


def test_files_of_the_current_folder_are_not_imported_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("multiprocessing", "socket", "pickle", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    with closing(ProcessSession(Odd, file="odd.onnx")) as backend:
        assert backend.run(given())


def test_a_process_that_was_forked_off_does_not_end_it(odd: ProcessSession) -> None:
    child = os.fork()
    if not child:
        said = 1
        try:
            odd.run(given())
        except GraphError as error:
            said = 0 if "forked" in error.message else 2
        finally:
            odd._finalizer()  # as at the end of a program
            os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert odd.run(given())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "mindir", "path": "a"}, "kind must be onnx or om, got 'mindir'"),
        ({"kind": "om", "path": ""}, "path is empty"),
        ({"kind": "om", "path": "a", "device_id": 256}, "from 0 to 255, got 256"),
        ({"kind": "om", "path": "a", "device_id": True}, "from 0 to 255, got True"),
        ({"kind": "onnx", "path": "a", "threads": 0}, "at least 1, got 0"),
    ],
)
def test_an_impossible_spec_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GraphSpec(**values)


def test_the_device_of_the_spec_is_the_one_that_is_opened(
    acl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "4")
    with closing(open_om(make_om(tmp_path / "a.om", [1]), device_id=3)) as om:
        assert om.name == "ais_bench (device 3)"
