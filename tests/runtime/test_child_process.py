"""Every outcome of a child process becomes an answer, and the process imports nothing from the current folder."""

import os
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.child_process import ask_child, broken, ok

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("question", "arguments", "wanted"),
    [
        ("says", ("x",), ok("x")),
        ("raises", (), broken("OSError: no luck")),
        ("dies", (), broken("its check was ended by signal 11")),
        ("hangs", (), broken("its check did not end within 1 s")),
    ],
)
def test_every_outcome_of_a_child_is_an_answer(question: str, arguments: tuple[str, ...], wanted: Any) -> None:
    seconds = 1 if question == "hangs" else 60
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}  # it says more
    said = ask_child(f"tests.runtime.child_questions:{question}", *arguments, environ=environ, seconds=seconds)

    assert said == wanted


def test_files_of_the_current_folder_are_not_imported_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise AssertionError('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))

    assert ask_child("tests.runtime.child_questions:says", "here", environ=os.environ, seconds=60) == ok("here")
