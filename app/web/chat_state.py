"""What a page remembers of one chat: the picture and the questions asked about it. Plain values, no Gradio."""

from dataclasses import dataclass, replace

from llama_adapter.app.tasks.answers import Answer
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.problems import Problem

MAX_TURNS = 50  # the page and the session's memory stay bounded


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedPicture:
    """The picture that questions are about. Its bytes stay in the file until they are asked about."""

    source: str  # the file as it was uploaded
    shown: str  # the file that the page shows: the same, or a preview of a kind that browsers know
    name: str
    width: int = 0  # in pixels, upright; 0 where it could not be read
    height: int = 0
    num_bytes: int = 0
    problem: str = ""  # why it cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One question and what came of it until now."""

    question: str
    text: str = ""
    answer: Answer | None = None  # at its end
    problem: Problem | None = None  # in the place of an answer

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return self.answer is None and self.problem is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A picture and the turns about it, oldest first."""

    picture: PickedPicture | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether an answer is under way."""
        return bool(self.turns) and self.turns[-1].is_open

    def with_turn(self, turn: Turn) -> "Chat":
        """One more; the oldest is forgotten where there are too many."""
        return replace(self, turns=(*self.turns, turn)[-MAX_TURNS:])

    def with_last(self, turn: Turn) -> "Chat":
        """The last one in a new state."""
        return replace(self, turns=(*self.turns[:-1], turn))

    def without_last(self) -> "Chat":
        """As before the last question."""
        return replace(self, turns=self.turns[:-1])


class ChatSession:
    """A page's chat as it changes. Handlers of one page run side by side, so each asks whether it is still wanted."""

    def __init__(self) -> None:
        self.chat = Chat()
        self.wanted: tuple[str, str] | None = None  # path and name of the picture that was chosen last
        self.run: object | None = None  # whoever may write the last turn

    def choose(self, picture: PickedPicture) -> None:
        """A new picture starts anew; what is known by now of the present one is filled in."""
        same = self.chat.picture is not None and self.chat.picture.source == picture.source
        self.chat = Chat(picture=picture, turns=self.chat.turns if same else ())

    def drop(self) -> None:
        """The picture was taken away."""
        self.run, self.chat = None, Chat()

    def begin(self, run: object, turn: Turn, *, is_again: bool = False) -> None:
        """`run` writes the last turn from now on, `is_again` in place of it; one that was left open is closed."""
        if is_again:
            self.chat = self.chat.without_last()
        if self.chat.is_open:
            self.chat = self.chat.with_last(replace(self.chat.turns[-1], problem=_OVERTAKEN))
        self.run, self.chat = run, self.chat.with_turn(turn)

    def clear(self) -> None:
        """The picture stays."""
        self.run, self.chat = None, Chat(picture=self.chat.picture)


_OVERTAKEN = Problem(exit_code=ExitCode.INTERRUPTED, http_status=499, sentence="Stopped for the next question.")
