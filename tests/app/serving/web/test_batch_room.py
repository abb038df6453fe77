"""The room that a batch run takes for its files: few are held in memory at once, and none after its end."""

import asyncio

import pytest

from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.app.serving.web.batch_run import BatchRun, PictureFile, Result
from llama_adapter.app.serving.web.runs import Run
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.serving.http_api.live import StubService, answer
from tests.app.serving.online.waiting import WAIT_S

FILE, NUM_FILES = b"a picture", 8


class StubOfRuns(StubService):
    """A service with room for two files of a run."""

    limits = ServiceLimits(max_waiting_bytes=8 * 2 * len(FILE))
    batch_size = 4

    def stage_seconds(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_run_holds_as_many_files_as_there_is_room_for_and_none_at_its_end(is_stopped: bool) -> None:
    handles, reads = list[RequestHandle](), list[str]()
    service = StubOfRuns(on_submit=handles.append)

    def read() -> bytes:
        reads.append("once more")
        return FILE

    async def main() -> list[Result]:
        run = Run()
        batch = BatchRun(
            service,  # type: ignore[arg-type]
            [PictureFile(name=f"{number}.png", read=read) for number in range(NUM_FILES)],
            question=Question(),
            sampling=SamplingParams(),
            run=run,
            client="test",
            window=NUM_FILES,
        )
        ticks = batch.results()
        while len(reads) < 4 or len(handles) < 2:
            assert await anext(ticks) == []
        assert await anext(ticks) == []
        assert (len(reads), len(handles)) == (4, 2), "two files are being answered, and two wait for room"

        if is_stopped:
            run.stop()
        else:
            answered = answer(ms={"total": 1.0})
            service.on_submit = lambda handle: handle.deliver(answered)
            for handle in handles:
                handle.deliver(answered)
        results = [result async for results in ticks for result in results]
        assert (batch._room._num_items, batch._room._num_bytes) == (0, 0)
        return results

    results = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert sorted(result.index for result in results) == ([] if is_stopped else [*range(NUM_FILES)])
