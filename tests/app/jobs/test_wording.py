"""Answers printed as text."""

import pytest

from llama_adapter.app.jobs.wording import Unfamiliar, text_line, unfamiliar_note
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
    names = ["a.png", "a.png", "b\n.png", "c.png", "d.png"]
    strange = [answered(picture=name, unfamiliar=True) for name in names]
    own = answered(picture="own.png", unfamiliar=False)
    error = AnswerError(code="not_finite", message="")
    answers = [*strange, own, answered(picture="bad.png", unfamiliar=True, finish="error", error=error)]

    assert unfamiliar_note(answers) == (
        "note: 5 of 6 answers may mean nothing, because this model was trained on pictures unlike these: "
        r"a.png, b\n.png, c.png, ..."
    )
    unfamiliar = Unfamiliar()
    for name in names:
        unfamiliar.add(answered(picture=name, unfamiliar=True))
    assert unfamiliar.note(has_records=True).endswith(
        r'a.png, b\n.png, c.png, ... (`"unfamiliar": true` in their records)'
    )


def test_as_many_unfamiliar_pictures_as_among_familiar_ones_are_not_worth_a_note() -> None:
    unfamiliar = Unfamiliar()
    for index in range(100):
        unfamiliar.add(answered(picture=f"{index}.png", unfamiliar=index < 4))
    assert unfamiliar.note().startswith("note: 4 of 100 answers")
    for index in range(40):
        unfamiliar.add(answered(picture=f"more {index}.png", unfamiliar=False))
    assert not unfamiliar.note()
    assert not Unfamiliar().note()
