"""Labelling: what keys do, which picture comes next, and what happens with pictures and models that fail."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.learning.labelled.label_table import LabelTable
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.app.serving.web.label_session import LabelSession, per_minute
from llama_adapter.app.serving.web.labelling import apply, label_html
from llama_adapter.llm.errors import PromptTooLongError
from tests.app.pictures.inputs.files import named
from tests.app.serving.http_api import live
from tests.app.serving.online.waiting import wait_for
from tests.app.serving.web.test_views import EVIL, Elements

CHOICES = ("cat", "dog", EVIL)
STAR = (sample_pictures() / "12-red-star.jpg").read_bytes()
GREY = np.full((3, 4, 3), 128, np.uint8)


class Stub:
    """The part of a service that labelling uses. A picture's last byte is the probability of `dog`, in per cent."""

    limits, batch_size = ServiceLimits(), 2

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[str] = []
        self.refusal: Exception | None = None

    def view(self, picture: bytes, *, name: str, side: int, client: str) -> "Future[PictureReading]":
        error = AnswerError(code="truncated", message=f"`{name}` is cut off.") if picture == b"broken" else None
        future: Future[PictureReading] = Future()
        future.set_result(PictureReading(pixels=None if error else GREY, error=error))
        return future

    def submit(self, ask: Ask) -> RequestHandle:
        if self.refusal is not None:
            raise self.refusal
        assert ask.picture is not None
        self.asked.append(Path(ask.label).name)
        handle, share = RequestHandle(len(self.asked), cancel=lambda handle: None), ask.picture[-1] / 100
        choice = None if ask.picture == b"broken" else {"cat": 1 - share, "dog": share, EVIL: 0.0}
        error = AnswerError(code="truncated", message="cut off") if choice is None else None
        reply: Answer = live.answer("", choice=choice, digest=ask.label, error=error)

        def deliver() -> None:
            self.may_answer.wait(30)
            handle.deliver(reply)

        threading.Thread(target=deliver, daemon=True).start()
        return handle

    def visual_features(self, digest: str) -> np.ndarray | None:
        return np.array([float(len(digest))], np.float32)


Open = Callable[..., LabelSession]


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.may_answer.set()


@pytest.fixture
def open_session(stub: Stub, tmp_path: Path) -> Iterator[Open]:
    """Opens a session on pictures, given by their names and probabilities; a session before it is closed."""
    opened: list[tuple[LabelSession, LabelTable]] = []

    def close() -> None:
        stub.may_answer.set()
        for session, table in opened:
            session.close()
            table.close()
        opened.clear()
        stub.may_answer.clear()

    def open_session(pictures: Mapping[str, bytes | int], **options: Any) -> LabelSession:
        close()
        for name, content in pictures.items():
            data = content if isinstance(content, bytes) else STAR + bytes([content])
            (tmp_path / name).write_bytes(data)
        inputs = options.pop("inputs", named(*(tmp_path / name for name in pictures)))
        table = LabelTable(tmp_path / "labels.csv", question=options.pop("asked", None))
        session = LabelSession(stub, inputs, table, question="Which?", choices=CHOICES, **options)  # type: ignore[arg-type]
        opened.append((session, table))
        return session

    yield open_session
    close()


def name_of(session: LabelSession) -> str:
    return Path(session.shown().name).name


def do(session: LabelSession, action: str, choice: int | None = None) -> tuple[str, str]:
    return apply(session, {"action": action, "picture": session.shown().picture, "choice": choice})


def rows(tmp_path: Path) -> list[str]:
    return (tmp_path / "labels.csv").read_text().splitlines()[1:]


def test_keys_label_skip_and_take_back_and_a_later_run_goes_on(open_session: Open, tmp_path: Path) -> None:
    pictures = {f"{number}.png": 50 for number in range(4)}
    session = open_session(pictures, now=iter(range(100)).__next__)
    names = [name_of(session)]
    for action in ("choose", "skip", "choose"):
        assert do(session, action, 1) == ("", "")
        names.append(name_of(session))

    assert (len(set(names)), rows(tmp_path)) == (4, [f"{names[0]},dog", f"{names[2]},dog"])
    shown = session.shown()
    counts = shown.num_labelled, shown.num_skipped, shown.num_pictures, shown.per_minute, shown.last
    assert counts == (2, 1, 4, 60.0, "“dog”")

    for expected in (names[2], names[1], names[0], names[0]):
        do(session, "undo")
        assert name_of(session) == expected
    assert (rows(tmp_path), session.shown().last) == ([], "")
    for name in names[:3]:
        assert name_of(session) == name, "what was taken back is asked again in its order"
        do(session, "choose", 0)

    session = open_session(pictures)
    assert (name_of(session), session.shown().num_labelled, session.shown().last) == (names[3], 3, "“cat”")
    do(session, "choose", 2)
    assert (session.shown().picture, len(rows(tmp_path))) == (None, 4)
    for number in (3, 2, 1, 0):
        do(session, "undo")
        assert (name_of(session), len(rows(tmp_path))) == (names[number], number), "also rows of the earlier run"


def test_events_about_another_picture_and_nonsense_change_nothing(open_session: Open, tmp_path: Path) -> None:
    session = open_session({"a.png": 50, "b.png": 50})
    first = session.shown().picture
    do(session, "choose", 0)
    second = name_of(session)
    for late in ({"action": "choose", "choice": 1}, {"action": "skip"}, {"action": "undo"}):
        assert apply(session, {**late, "picture": first}) == ("", "")
    for value in (None, "0", -1, 3, 1.0, True, [], {}):
        do(session, "choose", value)  # type: ignore[arg-type]
        apply(session, {"action": "choose", "picture": value, "choice": 0})
        apply(session, {"action": value})
    assert (name_of(session), len(rows(tmp_path))) == (second, 1)


def test_the_least_certain_picture_comes_next_once_the_model_has_answered(open_session: Open, stub: Stub) -> None:
    session = open_session({f"{share:02}.png": share for share in range(51, 100)})
    shown = session.shown()
    assert (shown.proposal, shown.is_waiting, session.is_waiting(shown.picture)) == (None, True, True)
    stub.may_answer.set()
    wait_for(lambda: len(session._proposals) == 49)
    assert stub.asked[0] == name_of(session), "what is shown is asked first"
    seen = set[str]()
    for _ in range(3):  # the picture and the next two were chosen before
        seen.add(name_of(session))
        do(session, "skip")
    name, proposal = name_of(session), session.shown().proposal
    assert name == min(set(stub.asked) - seen), "the pictures look alike, so only the margin counts"
    assert proposal is not None
    assert (proposal.choice, f"{100 * proposal.probability:.0f}.png") == (1, name)


def test_pictures_that_cannot_be_used_are_passed_over_with_the_reason(open_session: Open, tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(STAR + b"2")
    (tmp_path / "cut.png").write_bytes(b"broken")
    names = ("cut.png", "missing.png", "good.png", "good.png", "line\nfeed.png")
    inputs = [PictureInput(source=str(tmp_path / name), label=str(tmp_path / name)) for name in names]
    inputs.append(PictureInput.failed("nothing", "not_a_file", "It is a folder."))
    twice = str(tmp_path / "a.tar" / "a.png")
    inputs += [PictureInput(source=STAR, label=twice), PictureInput(source=STAR, label=twice, repeats=twice)]
    session = open_session({}, inputs=inputs)

    assert name_of(session) == "good.png"
    do(session, "choose", 0)
    shown = session.shown()
    assert (shown.picture, shown.num_pictures, rows(tmp_path)) == (None, 6, ["good.png,cat"])
    reasons = dict(shown.failed)
    assert "two pictures of this name" in reasons["a.tar/a.png"]
    assert reasons["cut.png"] == "`cut.png` is cut off."
    assert "found no file" in reasons["missing.png"]
    assert "rename it" in reasons[str(tmp_path / "line\nfeed.png")]
    assert reasons[str(Path("nothing").absolute())] == "It is a folder."


def test_labels_of_another_question_do_not_count(open_session: Open, tmp_path: Path) -> None:
    for question in ("Which {one}?", "How many?"):
        session = open_session({"a.png": 50}, asked=question)
        assert session.shown().picture == 0
        do(session, "choose", 0)
        assert session.shown().picture is None
    assert rows(tmp_path) == ["a.png,Which {{one}}?,cat", "a.png,How many?,cat"]


def test_without_proposals_and_with_a_full_disk_labelling_goes_on(
    open_session: Open, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.refusal = PromptTooLongError(num_tokens=9, context=8)
    session = open_session({"a.png": 50, "b.png": 50})
    wait_for(lambda: session.shown().problem)
    assert not session.shown().is_waiting
    name = name_of(session)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        problem = do(session, "choose", 0)
    assert "No space left" in problem[0]
    assert (name_of(session), list(tmp_path.glob("*.csv"))) == (name, [])
    assert 'role="alert"' in label_html(session, problem=problem)
    assert do(session, "choose", 0) == ("", "")
    assert rows(tmp_path) == [f"{name},cat"]


def test_the_page_shows_names_and_choices_as_text(open_session: Open, stub: Stub, tmp_path: Path) -> None:
    name = EVIL.replace("/", "")[:60]
    session = open_session({name: 90, "cut.png": b"broken"})
    stub.may_answer.set()
    wait_for(lambda: session.shown().proposal)
    page = label_html(session)
    elements = Elements(page)
    assert "onerror" not in elements.attributes
    assert elements.attributes["aria-keyshortcuts"] == ["Enter", "S", "U Backspace", "1", "2", "3"]
    assert elements.attributes["data-proposed"] == [None]
    assert ("90.0%" in page, "0 / 2" in page) == (True, True)
    do(session, "choose", 2)
    Elements(end := label_html(session))
    assert ("No picture is left" in end, "1 / 2" in end, "1 picture passed over" in end) == (True, True, True)


@pytest.mark.parametrize(
    ("times", "rate"), [([], None), ([3.0], None), ([3.0, 3.0], None), ([0, 2, 4], 30.0), ([0, 60], 1.0)]
)
def test_the_rate_is_that_of_the_last_labels(times: list[float], rate: float | None) -> None:
    assert per_minute(times) == rate
