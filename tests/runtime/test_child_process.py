"""Children are asked as from anywhere: what lies in the current folder is not theirs to import."""

import os
from pathlib import Path

import pytest

from llama_adapter.runtime.child_process import ask_child
from tests.app.golden import ROOT


def test_files_of_the_current_folder_are_not_imported_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise AssertionError('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))

    said = ask_child("tests.runtime.child_questions:says", "here", environ=os.environ, seconds=60)

    assert said["state"] == "ok"
