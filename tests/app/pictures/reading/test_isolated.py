"""Reading in other processes gives the same results, and if a process ends, at most its picture is lost."""

import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.pictures.reading import process
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.process import ReadingProcess
from llama_adapter.app.pictures.reading.process_pool import ReadingProcessError
from llama_adapter.app.pictures.reading.reader import _DECODING, PictureReader, PictureReading
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.runtime.child_process import ChildProcess
from llama_adapter.vision.pixels import PixelRule
from tests.app.golden import ROOT
from tests.app.pictures.reading.strange_reading import entry
from tests.odd_pictures.samples import saved

pytestmark = pytest.mark.slow

SIZE = 64
PIXELS = PixelRule(image_size=SIZE)
PICTURES = sorted(sample_pictures().glob("*.[pj][np]g"))[:6]


@pytest.fixture(scope="module")
def shared() -> Iterator[IsolatedReader]:
    with IsolatedReader(ReadingSpec(), pixels=PIXELS, timeout_s=30, num_processes=2) as reader:
        reader.start()
        yield reader


@pytest.fixture
def alone() -> Iterator[IsolatedReader]:
    """A reader with one process, so that the process that replaces it reads the next picture."""
    with IsolatedReader(ReadingSpec(), pixels=PIXELS, timeout_s=30, num_processes=1) as reader:
        yield reader


def read_here(source: object) -> PictureReading:
    return PictureReader(ReadingSpec(), pixels=PIXELS).read(source)  # type: ignore[arg-type]


def is_same(one: PictureReading, other: PictureReading) -> bool:
    return (one.digest, one.error) == (other.digest, other.error) and np.array_equal(one.pixels, other.pixels)  # type: ignore[arg-type]


def to_all(reader: IsolatedReader, number: signal.Signals) -> Callable[[str], bool]:
    """A `wants_pixels` callback that sends a signal to all reading processes in the middle of reading a picture."""

    def wants_pixels(digest: str) -> bool:
        for process_id in reader.process_ids:
            os.kill(process_id, number)
        return True

    return wants_pixels


@pytest.mark.parametrize(
    "source",
    [
        *PICTURES,
        *(ROOT / "tests/golden/images" / name for name in ("rgba_180x140.png", "exif6_160x120.jpg")),
        str(PICTURES[0]),
        PICTURES[1].read_bytes(),
        FileSlice(path=str(PICTURES[2]), offset=0, num_bytes=PICTURES[2].stat().st_size),
        FileSlice(path=str(PICTURES[2]), offset=7, num_bytes=2**40),
        Image.new("RGB", (90, 80), "red"),
        b"",
        b"no picture",
        "no/such/file.png",
        "not a name\0",
        "\udcff\ud800",
        str(ROOT),
    ],
    ids=lambda source: type(source).__name__,
)
def test_a_picture_is_read_as_it_is_here(shared: IsolatedReader, source: object) -> None:
    for name in (None, "upload 1"):
        here = PictureReader(ReadingSpec(), pixels=PIXELS).read(source, name=name)  # type: ignore[arg-type]
        assert is_same(shared.read(source, name=name), here)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [str(PICTURES[0]), PICTURES[0].read_bytes()], ids=["path", "bytes"])
def test_nothing_is_decoded_where_the_digest_tells_enough(shared: IsolatedReader, source: str | bytes) -> None:
    asked = []

    def is_new(digest: str) -> bool:
        asked.append(digest)
        return len(asked) > 1

    whole = read_here(source)
    reading = shared.read(source, wants_pixels=is_new)

    assert reading.is_only_digest
    assert is_same(shared.read(source, wants_pixels=is_new), whole)
    assert asked == [whole.digest] * 2 == [reading.digest] * 2


def test_many_threads_read_at_once_and_each_gets_its_own_picture(shared: IsolatedReader) -> None:
    expected = {path: read_here(path) for path in PICTURES}

    with ThreadPoolExecutor(8) as pool:
        readings = pool.map(lambda path: (path, shared.read(path)), PICTURES * 10)
        assert all(is_same(reading, expected[path]) for path, reading in readings)
    assert len(shared.process_ids) == 2


def test_a_relative_path_is_of_the_folder_that_is_the_current_one_when_it_is_read(
    shared: IsolatedReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.read(PICTURES[0])
    (tmp_path / "picture.png").write_bytes(PICTURES[1].read_bytes())
    monkeypatch.chdir(tmp_path)
    assert is_same(shared.read("picture.png"), read_here("picture.png"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc clears memory by an environment variable")
def test_a_damaged_picture_shows_nothing_of_the_pictures_before_it(alone: IsolatedReader) -> None:
    # libtiff leaves parts of this picture's memory uninitialised.
    damaged = (ROOT / "tests/odd_pictures/group4_with_bad_codes.tif").read_bytes()
    random = np.random.default_rng(0)
    seen = set()
    for side in random.integers(4, 400, 20).tolist():
        noise = random.integers(0, 255, (side, side, 3), dtype=np.uint8)
        alone.read(saved(Image.fromarray(noise), "TIFF", compression="tiff_lzw"))
        pixels = alone.read(damaged).pixels
        seen.add(pixels.tobytes())

    assert len(seen) == 1


def test_files_of_the_current_folder_are_not_imported(
    alone: IsolatedReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "numpy.py", "PIL.py"):
        (tmp_path / name).write_text("raise AssertionError('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    assert alone.read(PICTURES[0]).error is None  # its process starts here


class Clock:
    """The clock of the parent's side, which a test can put forward."""

    ahead_s = 0.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_picture_that_hangs_has_an_error_and_the_next_one_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def wants_pixels(digest: str) -> bool:
        """The process does not reply at once, so that a deadline that has passed is noticed."""
        clock.ahead_s += 100.0
        is_wanted = to_all(reader, signal.SIGSTOP)(digest)
        threading.Timer(0.2, to_all(reader, signal.SIGCONT), [digest]).start()
        return is_wanted

    dawdled = []

    def dawdles(reading: process.ReadingProcess, cpu_s: float) -> None:
        clock.ahead_s += process.AWAY_S + 0.1
        dawdled.append(cpu_s)

    monkeypatch.setattr(process, "time", clock)
    with IsolatedReader(ReadingSpec(), pixels=PIXELS, timeout_s=3.0, num_processes=1) as reader:
        reader.read(PICTURES[0])
        waited = reader.read(PICTURES[0], wants_pixels=wants_pixels)
        slow = reader.read(PICTURES[0], wants_pixels=to_all(reader, signal.SIGSTOP), keep_waiting=dawdles)
        hung = reader.read(PICTURES[0], wants_pixels=to_all(reader, signal.SIGSTOP))
        after = reader.read(PICTURES[1])

    assert waited.error is None  # the time that the caller takes does not count
    assert (slow.error.code, len(dawdled) <= 3) == ("timeout", True)  # the time that `keep_waiting` takes does
    assert (hung.error.code, hung.digest) == ("timeout", after.digest and read_here(PICTURES[0]).digest)
    assert str(PICTURES[0]) in hung.error.message
    assert is_same(after, read_here(PICTURES[1]))


class Frozen:
    """`select` in which the first polls find nothing, and last longer, as if the processes were frozen each time."""

    POLLIN = select.POLLIN

    def __init__(self, clock: Clock, reader: IsolatedReader, seconds: list[float]) -> None:
        self.clock, self.reader, self.seconds = clock, reader, list(seconds)

    def poll(self) -> SimpleNamespace:
        poll = select.poll()
        return SimpleNamespace(register=poll.register, poll=lambda ms: self.freeze() if self.seconds else poll.poll(ms))

    def freeze(self) -> list[tuple[int, int]]:
        self.clock.ahead_s += self.seconds.pop()
        to_all(self.reader, signal.SIGSTOP if self.seconds else signal.SIGCONT)("")
        for process_id in self.reader.process_ids if self.seconds else ():
            os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WNOWAIT)
        return []


@pytest.mark.parametrize("seconds", [[100.0], [process.AWAY_S + 0.1] * 6], ids=["once", "several times"])
@pytest.mark.parametrize("has_digest", [False, True], ids=["before the digest", "after the digest"])
def test_time_in_which_the_processes_are_frozen_does_not_count(
    has_digest: bool, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(process, "time", clock)
    with IsolatedReader(ReadingSpec(), pixels=PIXELS, timeout_s=3.0, num_processes=1) as reader:
        before = reader.read(PICTURES[0])
        process_ids, frozen = reader.process_ids, Frozen(clock, reader, seconds)

        def freezes(digest: str) -> bool:
            monkeypatch.setattr(process, "select", frozen)
            return True

        if not has_digest:
            freezes("")
        readings = before, reader.read(PICTURES[1], wants_pixels=freezes)
        assert (frozen.seconds, reader.process_ids) == ([], process_ids)

    for path, reading in zip(PICTURES, readings, strict=False):
        assert is_same(reading, read_here(path))


def test_processes_that_stay_stopped_are_replaced_and_no_picture_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOPPED_LIMIT_S", 0.2)
    with IsolatedReader(ReadingSpec(), pixels=PIXELS, timeout_s=600, num_processes=2) as reader:
        reader.start()
        stopped = [os.pidfd_open(process_id) for process_id in reader.process_ids]
        for descriptor in stopped:
            signal.pidfd_send_signal(descriptor, signal.SIGSTOP)  # amid their start
        with ThreadPoolExecutor(2) as pool:
            started = list(pool.map(reader.read, PICTURES[:2]))
        amid = reader.read(PICTURES[0], wants_pixels=to_all(reader, signal.SIGSTOP))
        with ThreadPoolExecutor(2) as pool:  # the other one was stopped while it was idle
            idle = list(pool.map(reader.read, PICTURES[:2]))

        assert all(select.select([descriptor], [], [], 20)[0] for descriptor in stopped), "they were killed"
    for descriptor in stopped:
        os.close(descriptor)
    for path, reading in zip([*PICTURES[:2], PICTURES[0], *PICTURES[:2]], [*started, amid, *idle], strict=True):
        assert is_same(reading, read_here(path))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGSEGV, "crashed"),
        (signal.SIGABRT, "crashed"),
        (signal.SIGKILL, None),  # the system may have run out of memory, so the picture is read once more
        *((number, None) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),  # these only end the job
    ],
)
def test_a_signal_during_a_reading_costs_at_most_that_picture(
    alone: IsolatedReader, number: signal.Signals, code: str | None
) -> None:
    alone.read(PICTURES[0])
    reading = alone.read(PICTURES[0], wants_pixels=to_all(alone, number))

    assert (reading.error and reading.error.code, reading.digest) == (code, read_here(PICTURES[0]).digest)
    if reading.error is None:
        assert is_same(reading, read_here(PICTURES[0]))
    else:
        assert number.name in reading.error.message
    assert is_same(alone.read(PICTURES[1]), read_here(PICTURES[1]))


def test_a_picture_whose_process_is_killed_each_time_has_an_error(
    alone: IsolatedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, killed = ReadingProcess.read, []

    def killed_amid(self: ReadingProcess, *given: Any, **named: Any) -> PictureReading:
        os.kill(self.child.process.pid, signal.SIGKILL)
        killed.append(self.child.process.pid)
        return read(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ReadingProcess, "read", killed_amid)
        crashed = alone.read(PICTURES[0])

    assert (crashed.error.code, "SIGKILL" in crashed.error.message, len(killed)) == ("crashed", True, 2)
    assert is_same(alone.read(PICTURES[1]), read_here(PICTURES[1]))
    to_all(alone, signal.SIGKILL)("")  # while it has nothing to do, which is no picture's fault
    assert is_same(alone.read(PICTURES[1]), read_here(PICTURES[1]))


def test_a_picture_for_which_memory_is_short_has_an_error_and_the_next_one_is_fine() -> None:
    content = saved(Image.new("RGB", (6000, 6000)), "PNG", compress_level=1)
    with IsolatedReader(ReadingSpec(), pixels=PIXELS, timeout_s=60, num_processes=1, memory_bytes=2**26) as reader:
        large = reader.read(content)
        after = reader.read(PICTURES[0])

    assert large.error.code == "too_large"
    assert is_same(after, read_here(PICTURES[0]))


@pytest.mark.parametrize(
    ("behaviour", "said"), [("talks_nonsense", "malformed"), ("has_a_fault", "RuntimeError: a fault of ours")]
)
def test_a_process_that_was_taken_over_or_has_a_fault_costs_its_picture(
    alone: IsolatedReader, monkeypatch: pytest.MonkeyPatch, behaviour: str, said: str
) -> None:
    monkeypatch.setattr(process, "ENTRY", entry(behaviour))
    reading = alone.read(PICTURES[0])

    assert reading.error.code == "crashed"
    assert said in reading.error.message


def test_a_decoder_that_writes_much_is_not_held_up_by_it_and_not_shown(
    alone: IsolatedReader, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "ENTRY", entry("writes_a_lot"))
    assert all(alone.read(PICTURES[0]).error is None for _ in range(3))
    alone.close()
    assert capfd.readouterr() == ("", "")


def test_processes_that_cannot_start_are_an_error_that_says_what_they_said(
    alone: IsolatedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "ENTRY", entry("ends_at_once"))
    monkeypatch.setattr("llama_adapter.app.pictures.reading.process_pool.START_PAUSE_S", 0.0)
    with pytest.raises(ReadingProcessError, match="no luck today"):
        alone.read(PICTURES[0])


def test_reading_stops_when_too_many_processes_cannot_be_ended(
    alone: IsolatedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_adapter.app.pictures.reading.process_pool.MAX_UNENDING", 1)
    alone.read(PICTURES[0])
    with monkeypatch.context() as patch:
        has_ended = ChildProcess.has_ended
        patch.setattr(ChildProcess, "has_ended", lambda child, **given: has_ended(child, **given) and False)
        assert alone.read(PICTURES[0], wants_pixels=to_all(alone, signal.SIGSEGV)).error is not None
        with pytest.raises(ReadingProcessError, match="hang in the operating system"):
            alone.read(PICTURES[0])
    assert alone.read(PICTURES[0]).error is None  # the process has ended after all


def test_what_the_caller_raises_comes_through_and_the_next_picture_is_fine(alone: IsolatedReader) -> None:
    def wants_pixels(digest: str) -> bool:
        raise KeyError(digest)

    with pytest.raises(KeyError):
        alone.read(PICTURES[0], wants_pixels=wants_pixels)
    assert is_same(alone.read(PICTURES[1]), read_here(PICTURES[1]))


def test_after_closing_nothing_is_left_and_nothing_is_read(alone: IsolatedReader) -> None:
    alone.start()
    process_ids = alone.process_ids
    alone.read(PICTURES[0])
    alone.close()
    alone.close()

    assert process_ids
    for process_id in process_ids:  # the processes were also reaped, so they do not exist
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    with pytest.raises(RuntimeError, match="closed"):
        alone.read(PICTURES[0])


def test_closing_ends_a_reading_under_way(alone: IsolatedReader) -> None:
    def wants_pixels(digest: str) -> bool:
        alone.close()
        return True

    with pytest.raises(RuntimeError, match="closed"):
        alone.read(PICTURES[0], wants_pixels=wants_pixels)
    assert alone.process_ids == ()


def is_true_in_a_fork(check: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that waits for a lock
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_is_forked_off_reads_by_processes_of_its_own(shared: IsolatedReader) -> None:
    expected = read_here(PICTURES[1])
    before = set(shared.process_ids)

    def reads_by_others() -> bool:
        is_right = is_same(shared.read(PICTURES[1]), expected) and not before & set(shared.process_ids)
        shared.close()
        return is_right

    assert is_true_in_a_fork(reads_by_others)
    assert is_same(shared.read(PICTURES[1]), expected)
    assert set(shared.process_ids) == before


def test_a_process_that_is_forked_off_during_a_reading_reads_given_images() -> None:
    with _DECODING:
        assert is_true_in_a_fork(lambda: read_here(Image.new("RGB", (8, 8))).error is None)


PARENT = """
import os, signal, sys, threading
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.vision.pixels import PixelRule

reader = IsolatedReader(ReadingSpec(), pixels=PixelRule(image_size=64), timeout_s=600, num_processes=2)
both_read = threading.Barrier(2)

def stop_one(digest):
    if both_read.wait() == 0:
        print(*reader.process_ids, flush=True)
        os.kill(reader.process_ids[0], signal.SIGSTOP)  # hangs, and cannot notice anything by itself
    sys.stdin.read()
    return True

for _ in range(2):
    threading.Thread(target=lambda: reader.read(sys.argv[1], wants_pixels=stop_one)).start()
"""


def test_no_process_outlives_a_parent_that_is_killed() -> None:
    command, pipe = [sys.executable, "-c", PARENT, str(PICTURES[0])], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as parent:
        watched = [os.pidfd_open(int(number)) for number in parent.stdout.readline().split()]
        parent.kill()
    try:
        assert len(watched) == 2
        for descriptor in watched:
            assert select.select([descriptor], [], [], 20)[0], "it lives on"
    finally:
        for descriptor in watched:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
