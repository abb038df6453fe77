"""Answers and notes as text for a terminal."""

from pathlib import Path
from typing import Final

from llama_adapter.app.captioning.decisions.decider import Decider
from llama_adapter.app.jobs.records.record import Record
from llama_adapter.app.jobs.report import MOST_NAMED, Tally
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_name

EMBEDDED_NOTE = (
    "note: the embedded model knows drawn shapes and nothing else; for photographs pass --model, "
    "for example smolvlm-500m-instruct"
)

EMBEDDED_TEXT = "the embedded model knows pictures only, and its answers to prompts without one mean nothing"
EMBEDDED_TEXT_NOTE = f"note: {EMBEDDED_TEXT}; pass --model or --llama-dir"

_NOTABLE: Final = 0.03  # share of unfamiliar pictures; a model marks 1 or 2 % of familiar ones too


def unfamiliar_note(tally: Tally, *, has_records: bool = False) -> str:
    """The note on answers about unfamiliar pictures; "" for at most 3 %. `has_records`: the answers are in a file."""
    if tally.num_unfamiliar <= _NOTABLE * tally.num_judged:
        return ""
    named = ", ".join(map(shown_name, tally.unfamiliar_names[:MOST_NAMED]))
    more = ", ..." if len(tally.unfamiliar_names) > MOST_NAMED else ""
    more += ' (`"unfamiliar": true` in their records)' if more and has_records else ""
    return (
        f"note: {tally.num_unfamiliar:,} of {tally.num_judged:,} answers may mean nothing, because this model was "
        f"trained on pictures unlike these: {named}{more}"
    )


def text_line(record: Record, *, decider: Decider | None = None, with_prompt: bool = False) -> str:
    """An answer as one line: with its likeliest choice if the choices are not those of the calibration."""
    said = one_line(record["text"])
    if record["choice"] is not None:
        calibration = None if decider is None else decider.calibration
        is_known = calibration is None or calibration.fits(record["choice"])
        decision = (decider if decider is not None and is_known else Decider()).decide(record["choice"])
        said = one_line(decision.text)
        said += "" if decision.probability is None else f" ({decision.probability:.2f})"
    asked = one_line(record["prompt"])
    asked += " " if asked.endswith(("?", ":", ".", "!")) else ": "
    return f"{shown_name(record['picture'])}: {asked if with_prompt else ''}{said}"


def one_line(text: str) -> str:
    """A model's text as one line: `UNSAFE_ON_TERMINALS` become spaces."""
    return UNSAFE_ON_TERMINALS.sub(" ", text)


def several_lines(text: str) -> str:
    """A model's text with its line feeds: other `UNSAFE_ON_TERMINALS` become spaces."""
    return "\n".join(map(one_line, text.split("\n")))


def is_sample(path: object) -> bool:
    """Whether a picture is one of the packaged samples."""
    try:
        return isinstance(path, str) and Path(path).resolve().is_relative_to(sample_pictures().resolve())
    except (OSError, ValueError, RuntimeError):  # the last one for a link to itself
        return False
