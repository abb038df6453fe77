"""A batch's handlers when its page is left and restored. The service gives the answers set by a test."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.app.serving.web.batch import MAX_RUNS_AT_ONCE, BatchEvents, BatchSession
from llama_adapter.app.serving.web.kept import Kept
from llama_adapter.app.serving.web.runs import Runs
from llama_adapter.app.serving.web.uploads import Upload, place_in_uploads, private_uploads
from tests.app.serving.http_api.live import StubService, answer
from tests.app.serving.online.waiting import WAIT_S
from tests.app.serving.web.browser import SAMPLES

KEY, OTHER_KEY = "1-2-3-4-a secret key", "5-6-7-8-another key"
SETTINGS = (16, 0, 0.9, 0, "", 0, 0, 0)
PROGRESS, CARDS, DOWNLOAD, CANCEL = -11, -8, -7, -3  # indices in the outputs of all handlers


class Stub(StubService):
    """A service that holds the requests of a batch until a test answers them."""

    limits, spec, batch_size = ServiceLimits(), CaptionerSpec(), 4

    def __init__(self) -> None:
        self.handles: list[RequestHandle] = []
        super().__init__(self.handles.append)

    def stage_seconds(self) -> dict[str, float]:
        return {}

    def answer(self) -> None:
        """Answer what was asked, and then everything at once."""
        self.on_submit = lambda handle: handle.deliver(answer("red", ms={"total": 1.0}))
        for handle in self.handles:
            self.on_submit(handle)


class Tab:
    """A tab of a browser: an open page, and what it was sent."""

    def __init__(self, events: BatchEvents, key: Any = KEY, *, page: str = "page") -> None:
        self.events, self.key, self.session = events, key, BatchSession()
        self.request: Any = SimpleNamespace(session_hash=page)

    async def open(self) -> list[Any]:
        return await self.events.restore(self.key, self.session, self.request)

    async def start(self, *, question: str = "Red?", num_pictures: int = 2) -> Any:
        """Press Start, and leave the page when the answers are under way; returns the first update."""
        self.session.add([Upload(path=place_in_uploads(path), name=path.name) for path in SAMPLES[:num_pictures]])
        updates = self.events.start(self.request, self.session, question, 0.7, 0.1, "", *SETTINGS)
        first = await anext(updates)
        await updates.aclose()
        return first

    async def follow(self) -> list[list[Any]]:
        return [update async for update in self.events.follow(self.session)]


@pytest.fixture
def service() -> Iterator[Stub]:
    with private_uploads():
        yield Stub()


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture
def events(service: Stub, runs: Runs) -> BatchEvents:
    return BatchEvents(service, samples=[], runs=runs)  # type: ignore[arg-type]


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), WAIT_S))


async def asked(service: Stub, number: int) -> None:
    while len(service.handles) < number:
        await asyncio.sleep(0.01)


def downloaded(update: list[Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(update[DOWNLOAD]["value"]).read_text().splitlines()]


def test_a_batch_goes_on_without_its_page_and_is_followed_by_the_reloaded_one(
    service: Stub, events: BatchEvents, runs: Runs
) -> None:
    async def main() -> None:
        before, after = Tab(events), Tab(events, page="reloaded")
        await before.open()
        await before.start()
        runs.leave("page")
        await asked(service, 2)

        restored = await after.open()
        assert restored[:2] == ["Red?", ""]
        assert restored[3:5] == [0.7, 0.1]
        assert all(sample.name in restored[5] for sample in SAMPLES[:2])
        assert 'data-state="running"' in restored[PROGRESS]
        assert "data-is-pressed" in restored[PROGRESS], "the page asks for the updates"
        assert restored[CANCEL]["visible"] is True

        assert not service.cancelled.is_set()
        service.answer()
        *updates, last = await after.follow()
        assert all("data-is-pressed" not in update[PROGRESS] for update in updates)
        assert "Done: 2 answered." in last[PROGRESS]
        assert last[CANCEL]["visible"] is False
        assert [record["text"] for record in downloaded(last)] == ["red", "red"]
        assert [len(runs.history(page)) for page in ("page", "reloaded")] == [0, 1]

    run(main)


def test_the_first_update_shows_everything_and_the_others_only_what_is_new(service: Stub, events: BatchEvents) -> None:
    async def main() -> None:
        tab = Tab(events)
        await tab.start()
        await asked(service, 2)
        updates = events.follow(tab.session)
        first, second = await anext(updates), await anext(updates)
        assert (first[CARDS], first[DOWNLOAD]["visible"], first[CANCEL]["visible"]) == ([], False, True)
        assert second[PROGRESS + 1 : -1] == [gr.skip()] * 9

        service.handles[0].deliver(answer("red", ms={"total": 1.0}))
        while (update := await anext(updates))[CARDS] == gr.skip():
            pass
        assert "red" in "".join(update[CARDS])
        assert update[DOWNLOAD:-1] == [gr.skip()] * 6
        service.answer()
        await tab.follow()

    run(main)


def test_answers_of_a_batch_that_ended_meanwhile_come_back_even_when_the_files_were_deleted(
    service: Stub, events: BatchEvents
) -> None:
    async def main() -> None:
        before, first, second = Tab(events), Tab(events), Tab(events)
        await before.open()
        service.answer()
        await before.start()
        assert before.session.shown.task is not None
        await before.session.shown.task

        shown = await first.open()
        assert "Done: 2 answered." in shown[PROGRESS]
        assert "data-is-pressed" not in shown[PROGRESS]
        assert len(downloaded(shown)) == 2
        Path(shown[DOWNLOAD]["value"]).unlink()
        assert len(downloaded(await second.open())) == 2

        second.events.clear(second.session)
        assert (await Tab(events).open())[:-1] == [gr.skip()] * 16, "a cleared batch is not restored"

    run(main)


@pytest.mark.parametrize("key", [OTHER_KEY, None, "", "short", 7, {}, "x" * 101])
def test_another_tab_sees_nothing_of_a_batch(service: Stub, events: BatchEvents, key: Any) -> None:
    async def main() -> None:
        before, other = Tab(events), Tab(events, key)
        await before.open()
        await before.start()
        shown = await other.open()
        assert (shown[:-1], shown[-1]) == ([gr.skip()] * 16, other.session)
        assert (other.session.files, other.session.shown.task) == ([], None)
        await Tab(events, key).open()
        assert (await Tab(events).open())[0] == "Red?", "the tab itself does"
        before.events.cancel(before.session)
        await before.follow()

    run(main)


def test_a_page_without_a_key_is_not_kept(service: Stub, events: BatchEvents) -> None:
    async def main() -> None:
        before = Tab(events, "short")
        await before.open()
        before.session.add([Upload(path="a", name="a.png")])
        assert (await Tab(events, "short").open())[:-1] == [gr.skip()] * 16

    run(main)


def test_cancel_on_the_reloaded_page_ends_the_batch(service: Stub, events: BatchEvents) -> None:
    async def main() -> None:
        before, after = Tab(events), Tab(events)
        await before.open()
        await before.start()
        await asked(service, 2)
        await after.open()
        after.events.cancel(after.session)
        assert service.cancelled.is_set()
        service.answer()  # the engine notices that they were cancelled
        assert "Cancelled: " in (await after.follow())[-1][PROGRESS]

    run(main)


def test_files_that_were_not_asked_about_come_back_and_a_page_that_has_begun_stays(events: BatchEvents) -> None:
    async def main() -> None:
        before, after, begun = Tab(events), Tab(events), Tab(events)
        await before.open()
        before.session.add([Upload(path="a", name="a.png")])
        restored = await after.open()
        assert "a.png" in restored[5]
        assert "1 file added" in restored[PROGRESS]
        assert restored[0] == gr.skip(), "no question was sent"
        begun.session.add([Upload(path="b", name="b.png")])
        await begun.open()
        assert [file.name for file in begun.session.files] == ["b.png"]

    run(main)


def test_a_batch_counts_until_it_ends_also_without_its_page(service: Stub, events: BatchEvents) -> None:
    async def main() -> None:
        tabs = [Tab(events, f"{number}-a long secret key") for number in range(MAX_RUNS_AT_ONCE + 1)]
        for tab in tabs[:-1]:
            await tab.start(num_pictures=1)
        assert "which is the limit" in (await tabs[-1].start())[PROGRESS]
        service.answer()
        await tabs[0].follow()
        assert "which is the limit" not in (await tabs[-1].start())[PROGRESS]
        for tab in tabs:
            await tab.follow()

    run(main)


def test_a_new_batch_ends_the_one_before_it(service: Stub, events: BatchEvents) -> None:
    async def main() -> None:
        tab = Tab(events)
        await tab.start()
        await asked(service, 2)
        first = asyncio.create_task(tab.follow())
        await asyncio.sleep(0)
        await tab.start(question="Blue?")
        assert service.cancelled.is_set()
        service.answer()
        assert all("Cancelled" not in update[PROGRESS] for update in await first), "its updates would hide the new one"
        assert "Done: 2 answered." in (await tab.follow())[-1][PROGRESS]

    run(main)


def test_the_oldest_tab_is_no_longer_kept() -> None:
    kept: Kept[int] = Kept(2)
    for number in range(3):
        assert kept.replace(f"{number}{KEY}", number) is None
    assert [kept.replace(f"{number}{KEY}", 9) for number in (2, 0, 1)] == [2, None, None]
    assert len(kept) == 2
