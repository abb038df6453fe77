"""Every outcome of a child process becomes an answer, and the process imports nothing from the current folder."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.child_process import ask_child, broken, ok

ROOT = Path(__file__).resolve().parents[2]


def says(text: str) -> dict[str, Any]:
    print("noise")
    return ok(text)


def raises() -> dict[str, Any]:
    raise OSError("no\nluck")


def dies() -> dict[str, Any]:
    os.kill(os.getpid(), 11)
    return ok("")


def hangs() -> dict[str, Any]:
    time.sleep(60)
    return ok("")


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
    said = ask_child(f"tests.runtime.test_child_process:{question}", *arguments, environ=environ, seconds=seconds)

    assert said == wanted


def test_files_of_the_current_folder_are_not_imported_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise AssertionError('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))

    assert ask_child("tests.runtime.test_child_process:says", "here", environ=os.environ, seconds=60) == ok("here")
