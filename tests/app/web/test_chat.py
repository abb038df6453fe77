"""The chat's handlers: which questions have a picture. The service gives the answers set by a test."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.online.types import ServiceLimits
from llama_adapter.app.terminal.wording import EMBEDDED_TEXT, EMBEDDED_TEXT_NOTE
from llama_adapter.app.web.chat import ChatEvents
from llama_adapter.app.web.chat_session import ChatSession, PickedPicture
from llama_adapter.app.web.page import about, build_page, head
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.uploads import place_in_uploads, private_uploads
from tests.app.http_api.live import StubService, answer

STAR = sample_pictures() / "12-red-star.jpg"
REQUEST: Any = SimpleNamespace(session_hash="page")
SETTINGS = (16, 0, 0.9, 0, "")
SHOWN = PickedPicture(source="", shown="", name="star.jpg")


class Stub(StubService):
    """The part of a service that the page uses."""

    limits = ServiceLimits()
    spec = CaptionerSpec()


@pytest.fixture
def service() -> Stub:
    return Stub(lambda handle: handle.deliver(answer("red star")))


@pytest.fixture
def alone(service: Stub) -> Stub:
    """A service of a LLaMA without adapter."""
    service.info = dataclasses.replace(service.info, has_adapter=False)
    service.spec = CaptionerSpec(llama_dir="LLaMA")
    return service


@pytest.fixture
def picture() -> Iterator[dict[str, str]]:
    """An uploaded picture, in the form that a browser sends."""
    with private_uploads():
        yield {"path": place_in_uploads(STAR), "orig_name": "star.jpg"}


def events_of(service: Stub, **options: Any) -> ChatEvents:
    return ChatEvents(service, samples=[STAR], runs=Runs(), **options)  # type: ignore[arg-type]


def last_of(updates: AsyncGenerator[list[Any]]) -> list[Any]:
    async def drain() -> list[Any]:
        return [update async for update in updates]

    return next(iter(asyncio.run(drain())[-1:]), [])


def ask(events: ChatEvents, session: ChatSession, *, value: Any, without: Any, question: str = "Red?") -> list[Any]:
    return last_of(events.ask(REQUEST, value, session, question, without, *SETTINGS))


@pytest.mark.parametrize(("without", "is_text"), [(True, True), (False, False), (None, False), (1, False), ({}, False)])
def test_a_question_leaves_out_the_picture_if_the_setting_is_on(
    service: Stub, picture: dict[str, str], without: Any, is_text: bool
) -> None:
    events, session = events_of(service), ChatSession()
    log = ask(events, session, value=picture, without=without)[3]

    (asked,) = service.asks
    assert (asked.picture, asked.text_prefix) == (None if is_text else STAR.read_bytes(), None)
    assert [turn.is_text for turn in session.turns] == [is_text]
    assert log.count("la-mark") == is_text
    assert session.about == ("" if is_text else "red star"), "an answer without a picture describes none"

    event = gr.EventData(None, {"index": 0})
    last_of(events.retry_or_clear(REQUEST, event, picture, session, "", not is_text, *SETTINGS))
    assert [turn.is_text for turn in session.turns] == [not is_text], "retried with the setting as it is now"


def test_without_a_picture_nothing_about_one_is_suggested_or_asked(service: Stub) -> None:
    events, session = events_of(service), ChatSession()
    _, _, log, offer = events.switch(session, True)
    assert ("la-chip" in offer, "Ask about a picture" in log) == (False, False)
    assert EMBEDDED_TEXT_NOTE.startswith(f"note: {EMBEDDED_TEXT};")
    assert EMBEDDED_TEXT[1:] in offer

    assert (
        last_of(events.ask_suggested(REQUEST, gr.EventData(None, {"index": 0}), None, session, "", True, *SETTINGS))
        == []
    )
    assert "Write a question first." in ask(events, session, value=None, without=True, question=" ")[2]
    assert "“Without a picture”" in ask(events, session, value=None, without=False)[2]
    assert service.asks == []
    assert "la-chip" in events.switch(session, False)[3]


def test_a_reload_keeps_questions_without_a_picture_and_the_setting(service: Stub) -> None:
    events, session, later = events_of(service), ChatSession(), ChatSession()
    token = events.restore(None, session)[0]
    ask(events, session, value=None, without=True)

    restored = events.restore(token, later)

    assert (restored[1], restored[3], later.turns) == (True, None, session.turns)
    assert not ChatSession().resume(ChatSession())


def test_a_picture_chosen_while_a_text_is_answered_starts_a_new_chat(picture: dict[str, str]) -> None:
    service = Stub(lambda handle: None)
    events, session = events_of(service), ChatSession()

    async def choose_meanwhile() -> list[list[Any]]:
        updates = events.ask(REQUEST, None, session, "Red?", True, *SETTINGS)
        shown = [await anext(updates), await anext(updates)]
        session.choose(dataclasses.replace(SHOWN, source=picture["path"]))
        events.stop(REQUEST)
        return shown + [update async for update in updates]

    assert len(asyncio.run(choose_meanwhile())) == 2
    assert (session.turns, service.cancelled.is_set()) == ((), True)


def test_a_llama_without_adapter_is_asked_texts_only(alone: Stub, picture: dict[str, str]) -> None:
    events, session = events_of(alone, sees_pictures=False), ChatSession(is_text=True)
    events.switch(session, False)
    ask(events, session, value=picture, without=False)

    assert [asked.picture for asked in alone.asks] == [None]
    assert "la-chip" not in events.offer(session)
    assert EMBEDDED_TEXT[1:] not in events.offer(session)


def test_the_page_of_a_llama_without_adapter_has_nothing_for_pictures(alone: Stub) -> None:
    async def config() -> dict[str, Any]:  # runs in an event loop; otherwise Gradio opens one and never closes it
        return build_page(alone, samples=[STAR]).get_config_file()  # type: ignore[arg-type, return-value]

    components = asyncio.run(config())["components"]
    (without,) = (one["props"] for one in components if one["props"].get("elem_id") == "chat-without")
    (side,) = (one["props"] for one in components if "la-side" in (one["props"].get("elem_classes") or ()))

    assert [one["props"]["label"] for one in components if one["type"] == "tabitem"] == ["Chat", "About"]
    assert (without["value"], without["interactive"], side["visible"]) == (True, False, False)
    assert "picture" not in head(alone)  # type: ignore[arg-type]
    assert "sees no pictures" in about(alone)  # type: ignore[arg-type]
