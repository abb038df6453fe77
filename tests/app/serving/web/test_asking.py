"""A chat without Gradio: uploaded files, showing a picture, a growing answer, and possible failures."""

import asyncio
import base64
import dataclasses
import functools
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.prompts import Dialogue
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.web.chat_session import ChatSession, PickedPicture, Turn, answer_turns, look
from llama_adapter.app.serving.web.runs import Runs
from llama_adapter.app.serving.web.uploads import (
    ForeignFileError,
    Upload,
    place_in_uploads,
    private_uploads,
    refuse_foreign_files,
    upload_of,
    uploaded,
    uploads_of,
)
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptTooLongError
from llama_adapter.vision.errors import PictureError
from tests.app.serving.http_api.live import StubService, answer, failed

MOON = sample_pictures() / "01-yellow-moon-green-cross.png"


@pytest.fixture(scope="module")
def uploads() -> Iterator[Path]:
    with private_uploads() as folder:
        yield folder


def picture_at(path: str) -> PickedPicture:
    return PickedPicture(source=path, shown=path, name="a.png", width=4, height=3, num_bytes=7)


def turns_of(
    service: Service,
    path: str | None,
    *,
    question: str = "Generate caption of this image",
    earlier: Sequence[Turn] = (),
) -> list[Turn]:
    async def collect() -> list[Turn]:
        with Runs().open("page", "chat") as run:
            picture = None if path is None else picture_at(path)
            turns = answer_turns(
                service,
                run,
                picture=picture,
                question=question,
                sampling=SamplingParams(),
                client="page",
                earlier=earlier,
            )
            return [turn async for turn in turns]

    return asyncio.run(collect())


def test_another_page_goes_on_with_a_chat_whose_picture_is_there(uploads: Path) -> None:
    before = ChatSession()
    before.choose(picture_at(place_in_uploads(MOON)))
    before.begin("run", Turn(question="q"))
    session, busy = ChatSession(), ChatSession()
    busy.choose(picture_at("/b.png"))

    assert session.resume(before)
    assert (session.picture, [turn.is_open for turn in session.turns]) == (before.picture, [True])
    assert not busy.resume(before)
    before.choose(picture_at("/etc/passwd"))
    assert not ChatSession().resume(before)


@pytest.mark.parametrize("path", ["/etc/passwd", "/nowhere", "", "a\0b", None])
def test_a_picture_from_elsewhere_and_a_service_that_is_not_ready_are_problems(uploads: Path, path: str | None) -> None:
    last = turns_of(Service(Captioner.load), place_in_uploads(MOON) if path is None else path)[-1]

    assert last.problem is not None
    assert ("The model is being loaded." if path is None else "no longer on the server") in last.problem.sentence


@pytest.mark.slow
def test_a_question_that_is_too_long_is_a_problem(service: Service, uploads: Path) -> None:
    last = turns_of(service, place_in_uploads(MOON), question="word " * 2000)[-1]

    assert last.problem is not None
    assert (last.problem.http_status, bool(last.problem.sentence)) == (400, True)


def test_values_are_files_only_if_they_have_a_path() -> None:
    assert upload_of({"path": "/u/a.png", "orig_name": "C:\\pictures\\my moon.png"}) == Upload(
        path="/u/a.png", name="C:\\pictures\\my moon.png"
    )
    assert Upload(path="", name="C:\\pictures\\my moon.png").base_name == "my moon.png"
    assert [upload_of(value) for value in (None, "text", 3, [], {}, {"path": 3}, {"url": "/u/a.png"})] == [None] * 7
    files = uploads_of([{"path": "/u/b.png", "orig_name": " "}, {"path": 3}, "text", None])
    assert files == [Upload(path="/u/b.png", name="b.png")]
    assert uploads_of(None) == uploads_of("text") == uploads_of({"path": "/a"}) == []


def test_only_regular_files_below_the_upload_folder_count_as_uploaded(uploads: Path) -> None:
    link = uploads / "link.png"
    link.symlink_to("/etc/passwd")
    moon = place_in_uploads(MOON)
    try:
        for path in (str(link), str(uploads) + "-beside/a.png", str(uploads), "/etc/passwd", "a\0b"):
            assert uploaded(path) is None
            with pytest.raises(ForeignFileError):
                refuse_foreign_files([{"nested": [{"path": path}]}])
    finally:
        link.unlink()
    assert uploaded(moon) is not None
    refuse_foreign_files([{"path": moon}, {"path": None}, "text", 3])


def test_uploads_are_in_a_private_folder_that_is_removed(
    uploads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / ".llama-adapter-web.00000000.partial" / "uploads").mkdir(parents=True)  # of a killed server
    with private_uploads() as folder:
        assert list(tmp_path.iterdir()) == [folder.parent]
        assert folder != uploads
        assert folder.parent.stat().st_mode & 0o077 == 0
        assert Path(place_in_uploads(MOON)).is_relative_to(folder)

    assert not folder.exists()
    assert Path(place_in_uploads(MOON)).is_relative_to(uploads)


def look_at(service: Service, data: bytes, name: str, *, uploads: Path) -> PickedPicture:
    path = uploads / name
    path.write_bytes(data)
    return asyncio.run(look(service, Upload(path=str(path), name=f"folder/{name}"), client="test"))


def packed(kind: str, image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.slow
def test_a_look_at_a_picture_gives_its_size_and_what_every_browser_shows(service: Service, uploads: Path) -> None:
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for name, data, size in (
        ("moon.png", MOON.read_bytes(), (224, 224)),
        ("tiff.jpg", packed("TIFF", Image.new("I;16", (300, 200))), (300, 200)),
        ("turned.webp", packed("WEBP", Image.new("RGB", (300, 200)), exif=turned), (200, 300)),  # Chromium: as stored
    ):
        seen = look_at(service, data, name, uploads=uploads)
        assert (seen.name, seen.width, seen.height, seen.num_bytes) == (name, *size, len(data))
        head, _, code = seen.shown.partition(",")
        assert head == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(code))) as preview:
            assert preview.size == size


@pytest.mark.slow
def test_a_look_at_a_picture_that_cannot_be_read_says_why(service: Service, uploads: Path) -> None:
    huge = packed("PNG", Image.new("1", (9_000, 6_000)))

    with pytest.raises(PictureError, match=r"`my\.png` is cut off"):
        look_at(service, MOON.read_bytes()[:700], "my.png", uploads=uploads)
    with pytest.raises(PictureError, match="50,000,000 pixels"):
        look_at(service, huge, "huge.png", uploads=uploads)
    gone = Upload(path=str(uploads / "gone.png"), name="gone.png")
    with pytest.raises(PictureError, match="no longer on the server"):
        asyncio.run(look(service, gone, client="test"))


@pytest.mark.parametrize("sees_tokens", [False, True])
def test_a_model_whose_template_has_turns_gets_those_whose_answers_are_shown(sees_tokens: bool, uploads: Path) -> None:
    service = StubService()
    service.info = dataclasses.replace(service.info, template="conversation", has_adapter=not sees_tokens)
    earlier = [
        Turn(question="Hello", is_text=True, text="Hi.", answer=failed("cancelled", "Hi.")),  # stopped
        Turn(question="Is it red?", text="yes", answer=answer("yes")),  # about a picture
        Turn(question="Stopped before its first word", is_text=True),
        Turn(question="Failed", is_text=True, text="It", answer=failed("prompt", "It")),
    ]

    turns = turns_of(service, None, question="Why?", earlier=earlier)  # type: ignore[arg-type]

    assert turns[-1].answer is not None
    greeted = (("user", "Hello"), ("assistant", "Hi."))
    assert service.asks[-1].prompt == Dialogue(greeted, "Why?")
    if not sees_tokens:
        return
    for before, prompt in (
        (earlier, Dialogue((*greeted, ("user", "Is it red?"), ("assistant", "yes")), "Why?", ((), (), (0,), (), ()))),
        (earlier[:1], Dialogue(greeted, "Why?", ((), (), (0,)))),
    ):
        turns_of(service, place_in_uploads(MOON), question="Why?", earlier=before)  # type: ignore[arg-type]
        assert service.asks[-1].prompt == prompt


class NarrowService(StubService):
    """A context for three questions with their answers."""

    def submit(self, ask: Ask) -> RequestHandle:
        assert isinstance(ask.prompt, Dialogue)
        if (needed := len(ask.prompt.turns) + 2 * (ask.least_room > 0)) > 6:
            raise PromptTooLongError(needed, 6)
        return super().submit(ask)


def test_the_oldest_turns_are_left_out_if_they_do_not_fit_with_an_answer() -> None:
    service = NarrowService()
    service.info = dataclasses.replace(service.info, template="conversation", has_adapter=False)
    asked = functools.partial(turns_of, service, None)  # type: ignore[arg-type]
    chat = [Turn(question=str(number), is_text=True, text="yes", answer=answer("yes")) for number in range(5)]

    chat.append(dataclasses.replace(asked(question="5", earlier=chat)[-1], text="yes"))
    assert [one.num_unseen for one in chat] == [0, 0, 0, 0, 0, 3]
    assert [text for _, text in service.asks[-1].prompt.turns[::2]] == ["3", "4"]  # type: ignore[union-attr]

    # The reading of a picture may show that there is less room still.
    errors = [AnswerError(code="prompt", message="too long"), None]
    service.on_submit = lambda handle: handle.deliver(answer("no", error=errors.pop(0)))
    last = asked(question="6", earlier=chat)[-1]
    assert last.answer is not None
    assert (last.answer.text, last.num_unseen, len(service.asks)) == ("no", 5, 3)
