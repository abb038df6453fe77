"""Batch runs: every file becomes a record, the window is kept, and an interrupted run keeps its results."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.choose import choosing
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.command_line import main as cli
from llama_adapter.app.serving.online.service import Ask, RequestHandle, Service, ServiceLimits, UnavailableError
from llama_adapter.app.serving.web.batch import BatchEvents, BatchSession
from llama_adapter.app.serving.web.batch_run import BatchRun, PictureFile, Result
from llama_adapter.app.serving.web.runs import Run, Runs
from llama_adapter.app.serving.web.uploads import Upload, place_in_uploads, private_uploads
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError
from llama_adapter.vision.errors import PictureError
from tests.app.serving.online.waiting import Gate, started, wait_for
from tests.app.serving.web.browser import SAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("models_placed_once")]

CAPTION = Question()


def files_of(paths: Sequence[Path]) -> list[PictureFile]:
    return [PictureFile(name=path.name, read=path.read_bytes) for path in paths]


def unreadable(name: str = "gone.png") -> PictureFile:
    def read() -> bytes:
        raise PictureError("missing", f"`{name}` is gone.")

    return PictureFile(name=name, read=read)


def batch(service: Service, files: Sequence[PictureFile], question: Question = CAPTION, **options: Any) -> BatchRun:
    options = {"sampling": SamplingParams(), "run": Run(), "client": "test", "num_pictures": len(files), **options}
    return BatchRun(service, files, question=question, **options)


async def collect(run: BatchRun) -> list[Result]:
    return [result async for results in run.results() for result in results]


def answered(service: Service, files: Sequence[PictureFile], question: Question = CAPTION) -> list[Result]:
    return sorted(asyncio.run(collect(batch(service, files, question))), key=lambda result: result.index)


@pytest.mark.parametrize("choices", [None, ("yes", "no")])
def test_records_are_those_of_the_command_line(
    service: Service, tmp_path: Path, choices: tuple[str, ...] | None
) -> None:
    out, pictures = tmp_path / "out.jsonl", SAMPLES[:4]
    flags = ["--reader", "thread", *(["--choices", ",".join(choices)] if choices else [])]
    asked = "Is there a red star?"
    assert cli.main(["ask", *map(str, pictures), "--question", asked, "--out", str(out), *flags]) == 0
    expected = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}

    results = answered(service, files_of(pictures), Question(instruction=asked, task=choosing(choices)))

    assert {result.record["id"] for result in results} == expected.keys()
    for result in results:
        same = expected[result.record["id"]]
        assert [result.record[key] for key in ("prompt", "text", "finish", "tokens")] == [  # type: ignore[literal-required]
            same[key] for key in ("prompt", "text", "finish", "tokens")
        ]


def test_no_more_requests_are_in_flight_than_the_window_takes(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, counts = service.submit, []

    def counting(ask: Ask) -> RequestHandle:
        handle = submit(ask)
        status = service.status()
        counts.append(status.num_running + status.num_waiting)
        return handle

    monkeypatch.setattr(service, "submit", counting)
    assert len(asyncio.run(collect(batch(service, files_of(SAMPLES), window=3)))) == len(SAMPLES)
    assert 1 <= max(counts) <= 3


def test_a_busy_service_is_asked_again_until_every_picture_is_answered() -> None:
    limits = ServiceLimits(max_waiting=2, max_waiting_per_client=1)
    with started(Service(Captioner.load, limits=limits)) as service:
        results = asyncio.run(collect(batch(service, files_of(SAMPLES[:5]), window=5)))

    assert sorted(result.index for result in results) == list(range(5))
    assert all(result.record["error"] is None for result in results)


def test_closing_the_results_early_cancels_what_is_in_flight() -> None:
    gate = Gate()

    async def main(service: Service) -> None:
        gate.close()
        results = batch(service, files_of(SAMPLES)).results()
        await anext(results)
        await asyncio.to_thread(wait_for, lambda: service.status().num_running > 0)
        await results.aclose()

    with started(Service(Captioner.load, observer=gate)) as service:
        asyncio.run(main(service))
        gate.open()
        assert service.wait_until_idle(60)


def test_too_many_batches_at_once_are_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.app.serving.web.batch.MAX_RUNS_AT_ONCE", 1)
    events, settings = BatchEvents(service, samples=[], runs=Runs()), (16, 0, 0.9, 0, "", 0, 0, 0)

    def start(page: str) -> AsyncGenerator[list[Any]]:
        request: Any = SimpleNamespace(session_hash=page)
        session = BatchSession()
        session.add([Upload(path=place_in_uploads(SAMPLES[0]), name="a.png")])
        return events.start(request, session, "", 0.5, 0.1, "", *settings)

    async def main() -> list[str]:
        first = start("first")
        await anext(first)
        refused = [update[0] async for update in start("second")]
        await first.aclose()
        return [*refused, *[update[0] async for update in start("second")]]

    with private_uploads():
        shown = asyncio.run(main())
    assert 'role="alert"' in shown[0]
    assert "1 of 1 pictures" in shown[-1]


def test_a_question_that_is_not_taken_raises_before_anything_is_answered(service: Service) -> None:
    long = Question(instruction="x" * 30_000)

    with pytest.raises(PromptError):
        answered(service, files_of(SAMPLES[:3]), long)
    assert service.wait_until_idle(60)


def test_a_service_that_closes_ends_the_run_and_keeps_what_is_done() -> None:
    async def main(service: Service) -> list[Result]:
        kept: list[Result] = []

        def closing() -> Iterator[PictureFile]:
            yield from files_of(SAMPLES[:4])
            service.close()
            yield from files_of(SAMPLES[4:])

        closed = BatchRun(
            service, closing(), question=CAPTION, sampling=SamplingParams(), run=Run(), client="test", window=1
        )
        with suppress(UnavailableError):
            async for new in closed.results():
                kept += new
            pytest.fail("the run did not end with UnavailableError")
        assert closed.figures().num_pictures == 4
        return kept

    with started(Service(Captioner.load)) as service:
        assert [result.index for result in asyncio.run(main(service))] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_others", [0, 1])
def test_figures_count_what_was_answered_and_note_requests_of_others(
    service: Service, monkeypatch: pytest.MonkeyPatch, num_others: int
) -> None:
    alone = service.status
    monkeypatch.setattr(service, "status", lambda: replace(alone(), num_running=alone().num_running + num_others))
    run = batch(service, [*files_of(SAMPLES[10:14]), unreadable()], window=4)
    asyncio.run(collect(run))
    figures = run.figures()
    assert (figures.num_pictures, figures.num_failed, figures.in_flight) == (4, 1, 4)
    assert figures.num_tokens > 4
    assert figures.was_shared is bool(num_others)
    assert figures.wall_s > 0
    assert figures.stages_s["forward"] > 0
    assert (figures.info, figures.batch_size) == (service.info, service.batch_size)
    assert run.progress.remaining_s == 0
