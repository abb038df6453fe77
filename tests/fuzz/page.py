"""Forged events of the page: any JSON values are refused, or handled without an exception."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gradio as gr

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.app.serving.web.batch import BatchEvents, BatchSession
from llama_adapter.app.serving.web.batch_files import BatchFiles
from llama_adapter.app.serving.web.chat import ChatEvents
from llama_adapter.app.serving.web.chat_session import ChatSession
from llama_adapter.app.serving.web.runs import Runs
from llama_adapter.app.serving.web.uploads import ForeignFileError, place_in_uploads, refuse_foreign_files
from llama_adapter.app.serving.web.widgets import picked
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.pixels import PixelRule
from tests.app.serving.http_api.live import StubService, answer
from tests.fuzz.mutators import mutated_json, words
from tests.fuzz.target import Target, event_loop, refused, scratch

_UPLOAD = "@upload"  # a placeholder for the path of an uploaded picture
_REQUEST = SimpleNamespace(session_hash="page")
_MOST_UPDATES = 50


class _Service(StubService):
    """The part of a service that the page uses."""

    limits = ServiceLimits(max_picture_bytes=100_000)
    batch_size = 2
    spec = CaptionerSpec()
    _reader = PictureReader(
        replace(spec.pictures, max_pixels=limits.max_pixels, max_bytes=limits.max_picture_bytes),
        pixels=PixelRule(image_size=32),
    )

    def stage_seconds(self) -> dict[str, float]:
        """No time is measured."""
        return {}

    def view(
        self, picture: bytes, *, name: str, side: int, client: str, is_wanted: Callable[[], bool] = bool
    ) -> Future[PictureReading]:
        """Like the service's method, but in this thread."""
        future: Future[PictureReading] = Future()
        future.set_result(self._reader.read(picture, name=name, side=side))
        return future


@cache
def _page() -> SimpleNamespace:
    """The handlers of both tabs, and the path of an uploaded picture."""
    samples = sorted(sample_pictures().glob("*.jpg"))[:3]
    upload = place_in_uploads(samples[0])
    service: Any = _Service(lambda handle: handle.deliver(answer("red")))
    given = {"samples": samples, "runs": Runs()}
    return SimpleNamespace(chat=ChatEvents(service, **given), batch=BatchEvents(service, **given), upload=upload)


def _await(value: Any) -> Any:
    return event_loop().run_until_complete(asyncio.wait_for(value, 10))


def _drain(updates: AsyncGenerator[Any]) -> int:
    """The number of updates; closes the generator."""

    async def drain() -> int:
        count = 0
        async with contextlib.aclosing(updates):
            async for _ in updates:
                count += 1
                if count >= _MOST_UPDATES:
                    break
        return count

    return int(_await(drain()))


def _chat(values: list[Any], event: Any) -> object:
    page, session = _page(), ChatSession()
    question, *settings, token, without = values
    page.chat.restore(token, session)
    _await(page.chat.choose(session, event, _REQUEST))
    _await(page.chat.choose_sample(session, event, _REQUEST))
    page.chat.switch(session, without)
    asked = (session, question, without, *settings)
    count = _drain(page.chat.ask(_REQUEST, *asked))
    count += _drain(page.chat.ask(_REQUEST, session, question, True, *settings))
    count += _drain(page.chat.ask_suggested(_REQUEST, event, *asked))
    page.chat.stop(_REQUEST)
    count += _drain(page.chat.retry_or_clear(_REQUEST, event, *asked))
    page.chat.restore(token, ChatSession())
    page.chat.remove(session, _REQUEST)
    return count


def _batch(values: list[Any], event: Any) -> object:
    page, session = _page(), BatchSession()
    _, threshold, band, choices, *_ = values
    page.batch.add(session, event)
    page.batch.remove(session, event)
    page.batch.add_sample(session, event)
    page.batch.start_from(event)
    page.batch.show_rule(choices)
    page.batch.decide(session, threshold, band)
    count = _drain(page.batch.start(_REQUEST, session, *values))
    page.batch.decide(session, band, threshold)
    page.batch.clear(session)
    batch = BatchFiles(picked(event)[0], limits=_Service.limits, max_pictures=20)
    with contextlib.closing(batch) as pictures:
        for picture in pictures.pictures:
            try:
                assert len(picture.read()) <= 100_000
            except PictureError as error:
                refused(error, is_shown=False)
    return count


_TABS: dict[str, tuple[Callable[[list[Any], Any], object], int]] = {"chat": (_chat, 8), "batch": (_batch, 9)}


def event(data: bytes) -> str:
    """Values of events in the tabs Chat and Batch, through their guards and handlers.

    An input is JSON: the tab, the values of its components, and the event's own data.
    """
    with patch.dict(os.environ, GRADIO_TEMP_DIR=str(scratch() / "uploads")):
        return _event(data)


def _event(data: bytes) -> str:
    path = _page().upload
    text = data.replace(_UPLOAD.encode(), json.dumps(path)[1:-1].encode())
    try:
        sent = json.loads(text)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(sent, dict) or not isinstance(sent.get("data"), list) or sent.get("tab") not in list(_TABS):
        return "no event"
    values = sent["data"]
    try:
        refuse_foreign_files(values)
    except ForeignFileError:
        return "foreign file"
    handle, count = _TABS[sent["tab"]]
    result = handle([*values, *[None] * count][:count], gr.EventData(None, sent.get("event_data")))
    return f"ok {sent['tab']} {result}"


def _events() -> dict[str, bytes]:
    file = {"path": _UPLOAD, "orig_name": "a.jpg", "meta": {"_type": "gradio.FileData"}, "size": 7}
    events = {
        "chat": ["What is it?", 16, 0, 0.9, 0, "7", "0123456789-a key", False],
        "batch": ["Is it red?", 0.5, 0.1, "yes, no", 16, 0, 0.9, 0, "7"],
    }
    files = [file, {**file, "orig_name": "pictures.zip"}, {**file, "orig_name": "folder/b.png"}]
    sent = {"index": 1, "files": files, "refused": ["`a.zip` has 3,000 MB"]}
    return {
        tab: json.dumps({"tab": tab, "data": values, "event_data": sent}).encode() for tab, values in events.items()
    }


_mutate = mutated_json(
    *words("path orig_name index event_data data url meta files refused"),
    *(_UPLOAD, "a.zip", "/etc/passwd", "a\0b"),
    *({"path": _UPLOAD}, {"path": _UPLOAD, "orig_name": "x.zip"}, [{"path": _UPLOAD}]),
    *("9" * 50, 10**400, 1e400),
)
TARGETS = (Target("page-event", event, _events, _mutate),)
