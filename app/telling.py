"""Answers and notes in words for a terminal."""

from pathlib import Path

from app.deciding import Decider
from app.records.record import Record
from app.resources import sample_pictures

EMBEDDED_NOTE = (
    "note: the embedded model knows drawn shapes and nothing else; for photographs pass --model, "
    "or --llama-dir, --adapter and --clip"
)


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
    return f"{record['picture']}: {asked}{said}"


def _before_answer(prompt: str) -> str:
    """A prompt, told apart from the answer behind it."""
    return f"{prompt} " if prompt.endswith(("?", ":", ".", "!")) else f"{prompt}: "


def one_line(text: str) -> str:
    """What a model wrote, fit for one line of a terminal: a space for every character that is not printed."""
    return "".join(character if character.isprintable() else " " for character in text)


def counted(number: int, done: str, *, what: str = "picture") -> str:
    """Such as: 3 pictures answered."""
    return f"{number} {what}{'' if number == 1 else 's'} {done}"


def is_sample(path: object) -> bool:
    """Whether a picture is one of those that the embedded model comes with."""
    try:
        return isinstance(path, str) and Path(path).resolve().is_relative_to(sample_pictures().resolve())
    except (OSError, ValueError):
        return False
