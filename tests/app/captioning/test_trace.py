"""A trace has the stages as spans, stops after a bounded number of spans, and never prevents an answer."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import profiler

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import STAGES, StageClock
from llama_adapter.app.captioning.trace import PREFIX, Trace
from llama_adapter.runtime.devices import CpuBackend
from tests.app.golden import GOLDEN, model_options

PICTURES = sorted((GOLDEN / "images").iterdir())[:2]


@pytest.fixture(scope="module")
def captioner() -> Iterator[Captioner]:
    # The profiler does not see the C kernels.
    with Captioner.load(**model_options(), device="cpu", batch_size=4, operators="aten") as loaded:
        yield loaded


def spans(file: Path) -> list[str]:
    """The stages in a trace, in chronological order."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        events = [event for event in json.load(text)["traceEvents"] if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(events, key=lambda event: float(event["ts"]))]
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]


@pytest.mark.slow
@pytest.mark.proves("traces", "CPU")
def test_a_trace_has_operators_and_every_stage_in_turn(captioner: Captioner, tmp_path: Path) -> None:
    told: list[str] = []
    with captioner.tracing(tmp_path / "new", tell=told.append):
        answers = captioner.generate(PICTURES)
    untraced = captioner.generate(PICTURES)

    (file,) = (tmp_path / "new").iterdir()
    stages = spans(file)
    assert set(stages) == set(STAGES)
    assert stages[:3] == ["read", "clip", "pre"]
    assert b"aten::" in gzip.decompress(file.read_bytes())
    assert [answer.text for answer in answers] == [answer.text for answer in untraced]
    assert len(told) == 1


def test_calls_in_another_thread_are_answered_without_a_trace(captioner: Captioner, tmp_path: Path) -> None:
    told: list[str] = []
    with captioner.tracing(tmp_path, tell=told.append):
        answers = asyncio.run(captioner.agenerate(PICTURES, max_new_tokens=1))

    assert [answer.finish for answer in answers] == ["length", "length"]
    assert (list(tmp_path.iterdir()), len(told)) == ([], 1)


def test_a_trace_inside_a_trace_is_refused(captioner: Captioner, tmp_path: Path) -> None:
    for count in (1, 2):  # two traces of one second are two files
        with captioner.tracing(tmp_path):
            with pytest.raises(RuntimeError), captioner.tracing(tmp_path):
                pass
            captioner.generate(PICTURES, max_new_tokens=1)

        assert len(list(tmp_path.iterdir())) == count


def test_a_trace_that_torch_left_incomplete_is_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def export(self: object, path: str) -> None:  # as on a full disk
        Path(path).write_text('{"traceEvents": [{"name": "aten::mm"')

    monkeypatch.setattr(profiler.profile, "export_chrome_trace", export)
    with pytest.raises(OSError, match="space"), CpuBackend().profiler(tmp_path):
        pass

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "word"), [(None, "ui.perfetto"), (OSError(28, "No space left"), "No space left")])
def test_a_long_run_goes_on_without_its_trace(error: OSError | None, word: str, tmp_path: Path) -> None:
    @contextmanager
    def profiler(folder: Path) -> Iterator[None]:
        yield
        if error is not None:
            raise error

    told: list[str] = []
    clock = StageClock()
    clock.trace = Trace(profiler, tmp_path, tell=told.append, max_spans=3)
    for _ in range(4):
        clock.enter("forward")
        clock.enter("post")
    clock.stop()
    clock.trace.close()

    assert len(told) == 1
    assert word in told[0]
