"""A page's chat: its state, checking a picture, and asking one question. Imports no Gradio."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from PIL import Image

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.prompts import Dialogue
from llama_adapter.app.pictures.reading.process_pool import ReadingProcessError
from llama_adapter.app.pictures.reading.views import data_address
from llama_adapter.app.serving.online.reading_pool import ReadingDroppedError
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.web.html import told
from llama_adapter.app.serving.web.runs import Run
from llama_adapter.app.serving.web.suggestions import num_named
from llama_adapter.app.serving.web.uploads import Upload, read_upload, uploaded
from llama_adapter.llm import conversation as dialogue
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.problems import Problem, describe
from llama_adapter.vision.errors import PictureError

MAX_TURNS = 50  # of one chat

_PREVIEW_SIDE = 800  # pixels; the page shows at most 400 wide, on screens with up to two pixels for one
_OVERTAKEN = Problem(exit_code=ExitCode.INTERRUPTED, http_status=499, sentence="Stopped for the next question.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedPicture:
    """The picture that questions are about. Its bytes stay in the file."""

    source: str  # path of the uploaded file
    shown: str  # a `data:` address of what the page shows: upright, on white, the first frame of an animation
    name: str
    width: int  # in pixels, after EXIF rotation
    height: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One question and its answer so far."""

    question: str
    is_text: bool = False  # whether it was asked without a picture
    num_unseen: int = 0  # earlier questions that the model did not see, because the context was full
    text: str = ""
    answer: Answer | None = None  # set at the end
    problem: Problem | None = None  # set instead of an answer

    @property
    def is_open(self) -> bool:
        """Whether the answer may still grow."""
        return self.answer is None and self.problem is None


class ChatSession:
    """A page's picture and questions. If `is_text`, questions are asked without a picture.

    Handlers of one page run concurrently, so each checks whether it may still write. `choosing` is the last choice of
    files, while they are read. `run` is the run that writes the last of `turns` (oldest first).
    """

    def __init__(self, *, is_text: bool = False) -> None:
        self.is_text = is_text
        self.picture: PickedPicture | None = None
        self.turns: tuple[Turn, ...] = ()
        self.choosing: asyncio.Future[bool] | None = None  # its result: whether there was a picture among them
        self.run: object | None = None
        self.about = ""  # description of the picture, for suggested questions

    def resume(self, other: "ChatSession") -> bool:
        """Continue the chat of another page, unless its picture is gone or this page has begun a chat meanwhile.

        If the last answer was interrupted, its turn stays open, and may be asked again.
        """
        is_there = bool(other.turns) if other.picture is None else uploaded(other.picture.source) is not None
        if self.choosing is not None or self.picture is not None or self.turns or not is_there:
            return False
        self.picture, self.turns, self.about = other.picture, other.turns, other.about
        self.is_text = other.is_text
        return True

    async def settled(self) -> bool:
        """Wait until chosen files are read; returns False if there was no picture among the last ones."""
        is_chosen = True
        while self.choosing is not None:
            is_chosen = await asyncio.shield(self.choosing)
        return is_chosen

    def choose(self, picture: PickedPicture) -> None:
        """Set the picture. Another picture than the present one starts a new chat."""
        if self.picture is None or self.picture.source != picture.source:
            self.run, self.turns, self.about = None, (), ""
        self.picture = picture

    def drop(self) -> None:
        """Remove the picture and its questions."""
        self.run, self.picture, self.turns, self.choosing, self.about = None, None, (), None, ""

    def clear(self) -> None:
        """Remove the questions."""
        self.run, self.turns = None, ()

    def is_asking(self, question: str) -> bool:
        """Whether the answer to this question is under way."""
        return (
            self.run is not None and bool(self.turns) and self.turns[-1].is_open and self.turns[-1].question == question
        )

    def begin(self, run: object, turn: Turn, *, is_again: bool = False) -> None:
        """Add a last turn, which `run` writes; if `is_again`, it replaces the present one. An open turn is closed."""
        turns = self.turns[:-1] if is_again else self.turns
        if turns and turns[-1].is_open:
            turns = (*turns[:-1], replace(turns[-1], problem=_OVERTAKEN))
        self.run, self.turns = run, (*turns, turn)[-MAX_TURNS:]

    def update(self, turn: Turn) -> None:
        """Replace the last turn. An answer that names more objects of a familiar picture than `about` replaces it."""
        self.turns = (*self.turns[:-1], turn)
        answer = turn.answer
        if answer is not None and answer.error is None and not (answer.unfamiliar or turn.is_text):
            self.about = max(self.about, answer.text, key=num_named)


async def look(
    service: Service, file: Upload, *, client: str, is_wanted: Callable[[], bool] = lambda: True
) -> PickedPicture:
    """Read an uploaded picture: its size and what to show.

    Reading ends early if `is_wanted` returns False. Raises PictureError if the picture cannot be read, and
    ServiceError if the service is busy or unavailable.
    """
    path, name = file.path, file.base_name
    data = await asyncio.to_thread(read_upload, path, name=name, max_bytes=service.limits.max_picture_bytes)
    reading = service.view(data, name=name, side=_PREVIEW_SIDE, client=client, is_wanted=is_wanted)
    try:
        view = await asyncio.wait_for(asyncio.wrap_future(reading), service.limits.timeout_s)
    except (TimeoutError, ReadingDroppedError, ReadingProcessError):
        raise _not_read(name) from None
    if view.pixels is None:
        raise _not_read(name) if view.error is None else PictureError("unreadable", view.error.message)
    shown = await asyncio.to_thread(data_address, Image.fromarray(view.pixels))
    return PickedPicture(source=path, shown=shown, name=name, width=view.width, height=view.height, num_bytes=len(data))


def _not_read(name: str) -> PictureError:
    return PictureError("unreadable", f"The server could not read `{name}` in time; choose it again later.")


async def answer_turns(
    service: Service,
    run: Run,
    *,
    picture: PickedPicture | None,
    question: str,
    sampling: SamplingParams,
    client: str,
    earlier: Sequence[Turn] = (),
) -> AsyncGenerator[Turn]:
    """Ask the question of a turn; yields the turn at first, whenever its text grows, and at its end.

    Errors become its `problem`. `earlier` are the turns before it, for a model whose template has turns. The oldest
    are left out if the context has no room for them and an answer.
    """
    turn = Turn(question=question, is_text=picture is None)
    yield turn
    try:
        ask = Ask(picture=None, prompt=question, sampling=sampling, client=client)
        if picture is not None:
            most = service.limits.max_picture_bytes
            data = await asyncio.to_thread(read_upload, picture.source, name=picture.name, max_bytes=most)
            ask = replace(ask, picture=data, label=picture.name)
        sees = service.info.sees_earlier or (picture is None and service.info.has_turns)
        seen = _answered(earlier, turn) if sees else []
        # What did not fit before is not tried again: the chat has only become longer.
        num_unseen = max((one.num_unseen for one in seen if one.is_text == turn.is_text), default=0)
        for unseen in range(min(num_unseen, len(seen)), len(seen) + 1):
            is_last = unseen == len(seen)
            if sees:
                room = 0 if is_last else min(sampling.max_new_tokens, service.info.context // 2)
                ask = replace(ask, prompt=_dialogue(seen[unseen:], turn), least_room=room)
            try:
                handle = service.submit(ask)
            except PromptError:
                if is_last:
                    raise
                continue
            run.add(handle)
            turn = replace(turn, num_unseen=unseen)
            try:
                async for events in handle.groups():  # larger ones for a slow reader
                    text = "".join(event.text for event in events if not isinstance(event, Answer))
                    answer = next((event for event in events if isinstance(event, Answer)), None)
                    if (
                        answer is not None
                        and answer.error is not None
                        and answer.error.code == "prompt"
                        and not is_last
                    ):
                        break  # the picture turned out to have too many tokens
                    turn = replace(turn, text=turn.text + text, answer=answer)
                    yield turn
                else:
                    return
            finally:
                handle.cancel()  # has no effect on an answered request
                run.discard(handle)
    except Exception as error:
        sentence, hint = told(error)
        yield replace(turn, problem=replace(describe(error), sentence=sentence, hint=hint))


def _answered(earlier: Sequence[Turn], asked: Turn) -> list[Turn]:
    """The turns before a question with an answer that is shown, also one that was cut short.

    They are turns without a picture, if the question is asked without one.
    """
    errors = [None if turn.answer is None else turn.answer.error for turn in earlier]
    is_shown = [error is None or error.code in ("cancelled", "deadline") for error in errors]
    shown = [turn for turn in compress(earlier, is_shown) if turn.text]
    return [turn for turn in shown if turn.is_text or not asked.is_text]


def _dialogue(seen: Sequence[Turn], asked: Turn) -> Dialogue:
    """The question with the turns before it. The picture stands in front of the first question about it."""
    said: list[dialogue.Turn] = []
    for turn in seen:
        said += [("user", turn.question), ("assistant", turn.text)]
    first = 2 * next((number for number, turn in enumerate([*seen, asked]) if not turn.is_text), len(seen))
    places = () if asked.is_text else tuple((0,) * (number == first) for number in range(len(said) + 1))
    return Dialogue(tuple(said), asked.question, pictures=places)
