"""Files of prompts with the suffix .json: a list, or the JSON lines of PaddleNLP."""

import os
from pathlib import Path

import pytest

from llama_adapter.app.pictures.inputs.items import InputsError
from llama_adapter.app.pictures.inputs.prompts import check_prompts, prompt_inputs


def test_a_json_of_lines_has_a_prompt_each(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text('{"src": "one", "tgt": ""}\n\n{"src": ["two"], "tgt": [""]}\n')

    check_prompts(str(path))
    assert [found.questions[0].raw for found in prompt_inputs(str(path), are_raw=True)] == ["one", "two"]


@pytest.mark.parametrize("text", ['\ufeff["a\u2028b", "c"]', '\ufeff{"src": "a\u2028b"}\r\n{"src": "c"}\r\n'])
def test_a_byte_order_mark_and_line_separators_inside_texts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(text, encoding="utf-8", newline="")

    check_prompts(str(path))
    assert [found.questions[0].instruction for found in prompt_inputs(str(path))] == ["a\u2028b", "c"]


def test_a_json_that_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    os.symlink("/dev/zero", path)

    with pytest.raises(InputsError):
        check_prompts(str(path))


@pytest.mark.parametrize("text", ["", "{", '"text"', "1\n2", '{"src": "one"}\n{'])
def test_other_content_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(text)

    with pytest.raises(InputsError):
        check_prompts(str(path))
