"""Answers in words."""

import pytest

from app.telling import text_line
from tests.app.recorded import FakeAnswer, recorded


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("Is there a star?", "a.png: Is there a star? no"),
        ("Generate caption of this image", "a.png: Generate caption of this image: no"),
    ],
)
def test_a_prompt_is_told_apart_from_its_answer(prompt: str, line: str) -> None:
    record = recorded(FakeAnswer(picture="a.png", prompt=prompt, text="no"))

    assert text_line(record, with_prompt=True) == line
    assert text_line(record) == "a.png: no"
