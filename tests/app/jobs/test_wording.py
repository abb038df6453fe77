"""Answers printed as text."""

from pathlib import Path

import pytest

from llama_adapter.app.jobs.report import Tally
from llama_adapter.app.jobs.wording import is_sample, text_line, unfamiliar_note
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.pictures.answer_error import AnswerError
from tests.app.recorded import answered, recorded


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("Is there a star?", "a.png: Is there a star? no"),
        ("Generate caption of this image", "a.png: Generate caption of this image: no"),
    ],
)
def test_a_prompt_is_told_apart_from_its_answer(prompt: str, line: str) -> None:
    record = recorded(picture="a.png", prompt=prompt, text="no")

    assert text_line(record, with_prompt=True) == line
    assert text_line(record) == "a.png: no"


def test_unfamiliar_pictures_are_said_once_with_the_first_names() -> None:
    tally = Tally()
    for name in ("a.png", "a.png", "b\n.png", "c.png", "d.png"):
        tally.add(answered(picture=name, unfamiliar=True))
    tally.add(answered(picture="own.png", unfamiliar=False))
    tally.add(answered(picture="other model.png", unfamiliar=None))
    error = AnswerError(code="not_finite", message="")
    tally.add(answered(picture="bad.png", unfamiliar=True, finish="error", error=error))

    said = (
        "note: 5 of 6 answers may mean nothing, because this model was trained on pictures unlike these: "
        r"a.png, b\n.png, c.png, ..."
    )
    assert unfamiliar_note(tally) == said
    assert unfamiliar_note(tally, has_records=True) == said + ' (`"unfamiliar": true` in their records)'


def test_as_many_unfamiliar_pictures_as_among_familiar_ones_are_not_worth_a_note() -> None:
    tally = Tally()
    for index in range(100):
        tally.add(answered(picture=f"{index}.png", unfamiliar=index < 4))
    assert unfamiliar_note(tally).startswith("note: 4 of 100 answers")
    for index in range(40):
        tally.add(answered(picture=f"more {index}.png", unfamiliar=False))
    assert not unfamiliar_note(tally)
    assert not unfamiliar_note(Tally())


def test_names_that_lead_nowhere_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "loop.png").symlink_to("loop.png")

    assert not any(map(is_sample, (f"{tmp_path}/loop.png", "a\0.png", "a" * 5000, b"bytes")))
    assert is_sample(str(sample_pictures() / "12-red-star.jpg"))
