"""The chat's handlers: which questions have a picture. The service gives the answers set by a test."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from llama_adapter.app.jobs.wording import EMBEDDED_TEXT, EMBEDDED_TEXT_NOTE
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.types import BusyError
from llama_adapter.app.serving.web.chat import MAX_FILES, ChatEvents
from llama_adapter.app.serving.web.chat_session import ChatSession, PickedPicture
from llama_adapter.app.serving.web.page import about, build_page, head
from llama_adapter.app.serving.web.runs import Runs
from llama_adapter.app.serving.web.uploads import place_in_uploads, private_uploads
from llama_adapter.vision.errors import PictureError
from tests.app.serving.http_api.live import StubService, answer

STAR = sample_pictures() / "12-red-star.jpg"
REQUEST: Any = SimpleNamespace(session_hash="page")
TOKEN = "1-2-3-4-a secret key"
SETTINGS = (16, 0, 0.9, 0, "")


@pytest.fixture
def service() -> StubService:
    return StubService(lambda handle: handle.deliver(answer("red star")))


@pytest.fixture
def alone(service: StubService) -> StubService:
    """A service of a LLaMA without adapter."""
    service.info = dataclasses.replace(service.info, has_adapter=False)
    service.spec = CaptionerSpec(llama_dir="LLaMA")
    return service


@pytest.fixture
def picture() -> Iterator[PickedPicture]:
    with private_uploads():
        path = place_in_uploads(STAR)
        yield PickedPicture(source=path, shown=path, name="star.jpg", width=224, height=224, num_bytes=6_000)


def events_of(service: StubService, **options: Any) -> ChatEvents:
    return ChatEvents(service, samples=[STAR], runs=Runs(), **options)  # type: ignore[arg-type]


def last_of(updates: AsyncGenerator[list[Any]]) -> list[Any]:
    async def drain() -> list[Any]:
        return [update async for update in updates]

    return next(iter(asyncio.run(drain())[-1:]), [])


def ask(events: ChatEvents, session: ChatSession, *, without: Any, question: str = "Red?") -> list[Any]:
    return last_of(events.ask(REQUEST, session, question, without, *SETTINGS))


@pytest.mark.parametrize(("without", "is_text"), [(True, True), (False, False), (None, False), (1, False), ({}, False)])
def test_a_question_leaves_out_the_picture_if_the_setting_is_on(
    service: StubService, picture: PickedPicture, without: Any, is_text: bool
) -> None:
    events, session = events_of(service), ChatSession()
    session.choose(picture)
    log = ask(events, session, without=without)[3]

    (asked,) = service.asks
    assert (asked.picture, asked.text_prefix) == (None if is_text else STAR.read_bytes(), None)
    assert [turn.is_text for turn in session.turns] == [is_text]
    assert log.count("la-mark") == is_text
    assert session.about == ("" if is_text else "red star"), "an answer without a picture describes none"

    event = gr.EventData(None, {"index": 0})
    last_of(events.retry_or_clear(REQUEST, event, session, "", not is_text, *SETTINGS))
    assert [turn.is_text for turn in session.turns] == [not is_text], "retried with the setting as it is now"


def test_without_a_picture_nothing_about_one_is_suggested_or_asked(service: StubService) -> None:
    events, session = events_of(service), ChatSession()
    _, _, log, offer = events.switch(session, True)
    assert ("la-chip" in offer, "Ask about a picture" in log) == (False, False)
    assert EMBEDDED_TEXT_NOTE.startswith(f"note: {EMBEDDED_TEXT};")
    assert EMBEDDED_TEXT[1:] in offer

    first = gr.EventData(None, {"index": 0})
    assert last_of(events.ask_suggested(REQUEST, first, session, "", True, *SETTINGS)) == [gr.skip()] * 7
    assert "Write a question first." in ask(events, session, without=True, question=" ")[2]
    assert "“Without a picture”" in ask(events, session, without=False)[2]
    refused = last_of(events.ask(REQUEST, session, "Red?", True, *SETTINGS[:4], "seven"))
    assert "The seed must be a whole number" in refused[2]
    assert service.asks == []
    assert "la-chip" in events.switch(session, False)[3]


def test_a_question_that_waited_leaves_the_page_as_the_checkbox_is_now(
    service: StubService, picture: PickedPicture
) -> None:
    events, session = events_of(service), ChatSession()
    session.choose(picture)
    events.switch(session, True)
    events.switch(session, False)
    offer = ask(events, session, without=True)[4]  # sent before the second change

    assert [turn.is_text for turn in session.turns] == [True]
    assert "la-chip" in offer
    assert service.asks[0].picture is None


def test_a_reload_keeps_questions_without_a_picture_and_the_setting(service: StubService) -> None:
    events, session, later = events_of(service), ChatSession(), ChatSession()
    events.restore(TOKEN, session)
    events.switch(session, True)
    ask(events, session, without=True)

    restored = events.restore(TOKEN, later)

    assert (restored[0], later.turns, later.picture) == (True, session.turns, None)
    assert "data-is-pressed" not in restored[3], "a whole answer is not asked for again"
    assert not ChatSession().resume(ChatSession())


def test_the_oldest_chat_is_dropped(service: StubService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.app.serving.web.chat.MAX_KEPT", 2)
    events = events_of(service)
    for key in "abac":  # a reload makes a chat the newest
        events.restore(key * 16, ChatSession())
    assert list(events._kept) == ["a" * 16, "c" * 16]
    told = [events.restore(key, ChatSession())[-1] for key in ("d" * 16, "c" * 16 + "+", "e" * 16 + "+")]
    assert told[:2] == [gr.skip()] * 2
    assert "no longer has the earlier questions of this tab" in told[2]


@pytest.mark.parametrize("token", [None, "", "short", 7, {}, "x" * 101])
def test_a_page_without_a_secret_key_is_not_kept(service: StubService, token: Any) -> None:
    events = events_of(service)
    assert events.restore(token, ChatSession()) == [gr.skip()] * 8
    assert not events._kept


def test_a_double_click_on_ask_asks_once() -> None:
    events, session = events_of(StubService(lambda handle: None)), ChatSession()

    async def ask_twice() -> list[list[Any]]:
        first = events.ask(REQUEST, session, "Red?", True, *SETTINGS)
        await anext(first)
        again = [update async for update in events.ask(REQUEST, session, "Red?", True, *SETTINGS)]
        await first.aclose()
        return again

    assert asyncio.run(ask_twice()) == [[gr.skip()] * 7]
    assert len(session.turns) == 1


def test_a_picture_chosen_while_a_text_is_answered_starts_a_new_chat(picture: PickedPicture) -> None:
    service = StubService(lambda handle: None)
    events, session = events_of(service), ChatSession()

    async def choose_meanwhile() -> list[list[Any]]:
        updates = events.ask(REQUEST, session, "Red?", True, *SETTINGS)
        shown = [await anext(updates), await anext(updates)]
        session.choose(picture)
        events.stop(REQUEST)
        return shown + [update async for update in updates]

    (last,) = asyncio.run(choose_meanwhile())[2:]
    assert ("la-turn" in last[3], "la-empty" in last[3]) == (False, True), "Gradio sends it again after other updates"
    assert (session.turns, service.cancelled.is_set()) == ((), True)


# Choosing files


def chosen(*paths: str, refused: Any = ()) -> gr.EventData:
    files = [{"path": path, "orig_name": f"C:\\pictures\\{path}"} for path in paths]
    return gr.EventData(None, {"files": files, "refused": refused})


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Reads files by their paths: `bad` and `busy` ones are refused, and `slow` ones wait for the event."""
    is_set = asyncio.Event()

    async def look(service: Any, file: Any, **_: Any) -> PickedPicture:
        await (is_set.wait() if "slow" in file.path else asyncio.sleep(0))
        if "bad" in file.path:
            raise PictureError("unreadable", f"`{file.base_name}` is bad")
        if "busy" in file.path:
            raise BusyError("Too many pictures are waiting to be shown")
        return PickedPicture(source=file.path, shown=file.path, name=file.base_name, width=4, height=3, num_bytes=7)

    monkeypatch.setattr("llama_adapter.app.serving.web.chat.look", look)
    return is_set


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("paths", "name", "told"),
    [
        (["bad.txt"], "star.jpg", ["<code>bad.txt</code> is bad"]),
        (["busy.png"], "star.jpg", ["Too many pictures"]),
        ([], "star.jpg", []),
        (["bad.txt", "moon.png"], "moon.png", ["bad.txt"]),
        (["moon.png", "bad.txt", "ring.png"], "moon.png", ["2 more files"]),
        ([*["bad"] * MAX_FILES, "moon.png"], "star.jpg", ["is bad"]),
    ],
)
def test_a_wrong_file_leaves_the_picture_and_its_questions(
    service: StubService, picture: PickedPicture, paths: list[str], name: str, told: list[str]
) -> None:
    events, session = events_of(service), ChatSession()
    session.choose(picture)
    ask(events, session, without=False)
    event = chosen(*paths, refused=["`huge.zip` has 3,000 MB", 7, None])
    _, html, *_, notice = asyncio.run(events.choose(session, event, REQUEST))

    assert session.picture is not None
    assert notice == (gr.skip() if name == "star.jpg" else ""), "a new picture ends what was said before"
    assert (session.picture.name, len(session.turns)) == (name, int(name == "star.jpg"))
    assert f'data-taken="{"no" if name == "star.jpg" else "yes"}"' in html
    assert [text for text in (f"<bdi>{name}</bdi>", "<code>huge.zip</code> has", *told) if text not in html] == []


@pytest.mark.usefixtures("reader")
def test_a_wrong_file_before_any_picture_is_explained(service: StubService) -> None:
    session = ChatSession()
    html = asyncio.run(events_of(service).choose(session, chosen("bad.txt"), REQUEST))[1]

    assert (session.picture, "bad.txt" in html, "No picture yet" in html) == (None, True, False)


@pytest.mark.parametrize(("path", "reply"), [("slow", "red star"), ("slow bad", "Send it again")])
def test_a_question_waits_until_the_chosen_file_is_read(
    service: StubService, reader: asyncio.Event, monkeypatch: pytest.MonkeyPatch, path: str, reply: str
) -> None:
    monkeypatch.setattr("llama_adapter.app.serving.web.chat_session.read_upload", lambda *_, **__: b"slow")
    events, session = events_of(service), ChatSession()

    async def ask_meanwhile() -> list[Any]:
        choosing = asyncio.create_task(events.choose(session, chosen(path), REQUEST))
        await asyncio.sleep(0)
        updates = events.ask(REQUEST, session, "Red?", False, *SETTINGS)
        first = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        assert not first.done()
        reader.set()
        await choosing
        return [await first, *[update async for update in updates]][-1]

    last = asyncio.run(ask_meanwhile())
    assert reply in "".join(value for value in last if isinstance(value, str))
    assert [asked.picture for asked in service.asks] == [b"slow"] * (path == "slow")


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_later_choice_or_removing_the_picture_ends_an_earlier_choice(
    service: StubService, reader: asyncio.Event, is_removed: bool
) -> None:
    events, session = events_of(service), ChatSession()

    async def change_meanwhile() -> list[Any]:
        first = asyncio.create_task(events.choose(session, chosen("slow"), REQUEST))
        await asyncio.sleep(0)
        if is_removed:
            events.remove(session, REQUEST)
        else:
            await events.choose(session, chosen("moon.png"), REQUEST)
        reader.set()
        return await first

    assert asyncio.run(change_meanwhile()) == [gr.skip()] * 7
    assert (session.picture and session.picture.name) == (None if is_removed else "moon.png")


def test_a_llama_without_adapter_is_asked_texts_only(alone: StubService, picture: PickedPicture) -> None:
    events, session = events_of(alone, sees_pictures=False), ChatSession(is_text=True)
    events.switch(session, False)
    session.choose(picture)
    ask(events, session, without=False)

    assert [asked.picture for asked in alone.asks] == [None]
    assert "la-chip" not in events.offer(session)
    assert EMBEDDED_TEXT[1:] not in events.offer(session)


def test_the_page_of_a_llama_without_adapter_has_nothing_for_pictures(alone: StubService) -> None:
    async def config() -> dict[str, Any]:  # runs in an event loop; otherwise Gradio opens one and never closes it
        return build_page(alone, samples=[STAR]).get_config_file()  # type: ignore[arg-type, return-value]

    page = asyncio.run(config())
    components = page["components"]
    (without,) = (one["props"] for one in components if one["props"].get("elem_id") == "chat-without")
    sides = [one["props"] for one in components if "la-side" in (one["props"].get("elem_classes") or ())]

    assert [one["props"]["label"] for one in components if one["type"] == "tabitem"] == ["Chat", "About"]
    assert (without["value"], without["interactive"]) == (True, False)
    assert [side["visible"] for side in sides] == [False, False], "the picture and the samples"
    labels = {one["id"]: one["props"].get("label") for one in components}
    ask = next(one["id"] for one in components if one["props"].get("elem_id") == "chat-ask")
    asked = next(one for one in page["dependencies"] if (ask, "click") in map(tuple, one["targets"]))
    assert [labels[number] for number in asked["inputs"]][3:] == [  # the arguments of `sampling_of`
        *("Maximum tokens", "Temperature", "Top p", "Top k", "Seed"),
        *("Min p", "Presence penalty", "Frequency penalty"),
    ]
    assert "picture" not in head(alone)  # type: ignore[arg-type]
    assert "sees no pictures" in about(alone)  # type: ignore[arg-type]
