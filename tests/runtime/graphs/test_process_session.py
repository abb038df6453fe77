"""A graph in a separate process: the same numbers and errors, and each process survives failures of the other."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.process_session import ProcessSession
from tests.fakes.exported import embedded_onnx, make_om, open_om, open_onnx, sample_pixels
from tests.fakes.foreign_onnx import foreign_onnx
from tests.runtime.graphs.odd_session import Habit, Odd, given, refuses

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def odd() -> Iterator[ProcessSession]:
    """A session shared by the tests that keep it alive, because a start takes seconds."""
    with closing(ProcessSession(Odd, file="odd.onnx")) as backend:
        yield backend


def test_it_computes_as_in_this_process() -> None:
    here = open_onnx(embedded_onnx(), threads=1)
    with closing(open_onnx(embedded_onnx(), threads=1, own_process=True)) as apart:
        assert np.array_equal(apart.encode(sample_pixels()[:3]), here.encode(sample_pixels()[:3]))
        assert (apart.card, apart.batch_sizes, apart.image_size) == (here.card, here.batch_sizes, here.image_size)
        assert apart.name == "onnxruntime (CPUExecutionProvider), own process"


def test_an_om_runs_there_on_the_device_of_the_spec(acl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "4")
    with closing(open_om(make_om(tmp_path / "clip.om", [1, 4]), device_id=3, own_process=True)) as apart:
        assert apart.name == "ais_bench (device 3), own process"
        assert len(apart.encode(sample_pixels()[:5])) == 5
        assert apart.device_ms is not None
    assert acl.RECORD.loaded == 0


def test_an_error_of_opening_reaches_this_process() -> None:
    with pytest.raises(GraphError) as caught:
        ProcessSession(refuses, file="odd.onnx")
    assert (caught.value.message, caught.value.hint) == ("No such encoder", "make one")


@pytest.mark.parametrize(("habit", "how"), [("DIE", "by SIGKILL"), ("EXIT", "with exit code 7")])
def test_a_process_that_ended_is_an_error(habit: str, how: str) -> None:
    with closing(ProcessSession(Odd, file="odd.onnx")) as backend:
        for _ in range(2):
            with pytest.raises(GraphError, match=rf"`odd\.onnx` was ended {how}") as caught:
                backend.run(given(Habit[habit]))
            assert ("memory" in caught.value.hint) == (habit == "DIE")


def test_an_unexpected_error_keeps_its_traceback_and_the_process_lives_on(odd: ProcessSession) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)odd\.onnx` failed.*Traceback.*ZeroDivisionError: a fault"):
        odd.run(given(Habit.FAIL))
    assert odd.run(given())


class Cut:
    """A connection whose next message is interrupted half-way, in the direction `direction`."""

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
def test_half_a_message_ends_the_process(
    direction: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(ProcessSession(Odd, file="odd.onnx")) as backend:
        monkeypatch.setattr(backend, "_connection", Cut(backend._connection, direction=direction))

        with pytest.raises(KeyboardInterrupt):
            backend.run(given())

        assert backend._child.process.returncode == -signal.SIGKILL
        for _ in range(2):
            with pytest.raises(GraphError, match=r"`odd\.onnx` was ended"):
                backend.run(given())
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_while_waiting_leaves_the_process_alone(odd: ProcessSession) -> None:
    _, before, session = odd.run(given())[0].tolist()
    assert before == session != os.getsid(0)  # signals from the terminal do not reach it
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


def test_closing_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    backend = ProcessSession(Odd, file="odd.onnx")
    backend.run(given(Habit.PRINT))
    for _ in range(2):
        backend.close()
    assert backend._child.process.returncode == 0
    assert capfd.readouterr() == ("", "noise from below\n")  # its output is not mixed into our data
    with pytest.raises(GraphError, match="was closed"):
        backend.run(given())


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    code = f"""
import os, signal
from llama_adapter.runtime.graphs.open_session import GraphSpec, open_session
session = open_session(GraphSpec(kind="onnx", path={str(file)!r}, own_process=True))
print(session._child.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert ends(int(result.stdout))


def ends(process: int) -> bool:
    """Whether the process is gone within seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and is_running(process):
        time.sleep(0.05)
    return not is_running(process)


def is_running(process: int) -> bool:
    """False also for zombies."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_script_without_a_main_guard_works_and_files_beside_it_are_not_imported(tmp_path: Path) -> None:
    for name in ("multiprocessing", "socket", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported from the current folder')")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
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
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("7.0\n", "")


def test_a_forked_process_does_not_end_it(odd: ProcessSession) -> None:
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
