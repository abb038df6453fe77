"""Answers and notes in words for a terminal."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from llama_adapter.app.calibration.decider import Decider
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.records.record import Record
from llama_adapter.app.tasks.answers import Answer
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_name

EMBEDDED_NOTE = (
    "note: the embedded model knows drawn shapes and nothing else; for photographs pass --model, "
    "or --llama-dir, --adapter and --clip"
)

_MAX_NAMED: Final = 3


class Unfamiliar:
    """Counts answers about pictures that are unlike those the model was trained on, to say it once at the end."""

    def __init__(self) -> None:
        self._num_answers = self._num_unfamiliar = 0
        self._names: list[str] = []

    def add(self, answer: Answer) -> None:
        """Take one answer into the counts; failures, and models that cannot tell, do not count."""
        if answer.error is not None or answer.unfamiliar is None:
            return
        self._num_answers += 1
        self._num_unfamiliar += answer.unfamiliar
        if answer.unfamiliar and answer.picture not in self._names and len(self._names) <= _MAX_NAMED:
            self._names.append(answer.picture)

    def note(self, *, what: str = "picture") -> str:
        """The sentence, empty where there is nothing to say; `what` an answer is to, as one word."""
        if not self._num_unfamiliar:
            return ""
        is_one = self._num_unfamiliar == 1
        if is_one and self._num_answers == 1:
            return (
                "note: the picture does not look like what this model was trained on, and the answer may mean nothing: "
                f"{shown_name(self._names[0])}"
            )
        about = "" if what == "picture" else f"{'is' if is_one else 'are'} about pictures that "
        looks = "does not look" if is_one and what == "picture" else "do not look"
        said = f"{self._num_unfamiliar:,} of {self._num_answers:,} {what}s {about}{looks}"
        named = ", ".join(shown_name(name) for name in self._names[:_MAX_NAMED])
        more = ", ..." if len(self._names) > _MAX_NAMED else ""
        return f"note: {said} like what this model was trained on, and the answers may mean nothing: {named}{more}"


def unfamiliar_note(answers: Iterable[Answer]) -> str:
    """`Unfamiliar.note` of answers that are all there."""
    unfamiliar = Unfamiliar()
    for answer in answers:
        unfamiliar.add(answer)
    return unfamiliar.note()


def text_line(record: Record, *, decider: Decider | None = None, with_prompt: bool = False) -> str:
    """An answer for a person: one line, whatever the model wrote.

    What `decider` was not calibrated for, such as a manifest's own choices, is the likeliest.
    """
    said = one_line(record["text"])
    if record["choice"] is not None:
        calibration = None if decider is None else decider.calibration
        is_known = calibration is None or calibration.fits(record["choice"])
        decision = (decider if decider is not None and is_known else Decider()).decide(record["choice"])
        said = one_line(decision.text)
        said += "" if decision.probability is None else f" ({decision.probability:.2f})"
    asked = _before_answer(one_line(record["prompt"])) if with_prompt else ""
    return f"{shown_name(record['picture'])}: {asked}{said}"


def _before_answer(prompt: str) -> str:
    """A prompt, told apart from the answer behind it."""
    return f"{prompt} " if prompt.endswith(("?", ":", ".", "!")) else f"{prompt}: "


def one_line(text: str) -> str:
    """What a model wrote, fit for one line of a terminal: a space for each of `UNSAFE_ON_TERMINALS`."""
    return UNSAFE_ON_TERMINALS.sub(" ", text)


def counted(number: int, done: str, *, what: str = "picture") -> str:
    """Such as: 3 pictures answered."""
    return f"{number:,} {what}{'' if number == 1 else 's'} {done}"


def is_sample(path: object) -> bool:
    """Whether a picture is one of those that the embedded model comes with."""
    try:
        return isinstance(path, str) and Path(path).resolve().is_relative_to(sample_pictures().resolve())
    except (OSError, ValueError):
        return False
