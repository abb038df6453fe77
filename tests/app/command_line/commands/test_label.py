"""`label` before its page is served: what it says about its pictures."""

from pathlib import Path

import pytest

from llama_adapter.app.command_line.commands import run_server
from llama_adapter.app.command_line.main import main
from llama_adapter.runtime.errors import ExitCode
from tests.app.pictures.inputs.files import fill


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The jobs that would have been served."""
    jobs: list[object] = []
    monkeypatch.setattr(run_server, "run_serve", lambda job, **_: jobs.append(job) or ExitCode.OK)  # type: ignore[func-returns-value]
    return jobs


def label(folder: Path, *inputs: str) -> int:
    names = [str(folder / name) for name in inputs]
    return main(["label", *names, "--choices", "a,b", "--out", str(folder / "labels.csv")])


def test_without_any_picture_the_reasons_are_said_and_nothing_is_served(
    tmp_path: Path, served: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "classes/a/1.png", "empty/notes.txt")

    assert label(tmp_path, "classes", "empty", "missing.jpg") == ExitCode.PICTURE_ERRORS
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith(f"which has none of its own, but folders in it; '{tmp_path}/classes/**' looks into them.")
    assert second.startswith("error: Wanted a picture file, got the folder")
    assert third.startswith("error: Wanted a picture file, found no file")
    assert not served


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["classes/a"], "1 picture found, 0 rows in "),
        (["classes", "classes/a"], "1 picture found, 0 rows in "),
        (["classes/a", "classes/b"], "2 pictures found, 0 rows in "),
        (["missing.jpg", "classes/**"], "2 pictures found, 0 rows in "),
    ],
)
def test_a_single_picture_is_enough_to_serve(
    inputs: list[str], said: str, tmp_path: Path, served: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "classes/a/1.png", "classes/b/2.png")

    assert label(tmp_path, *inputs) == ExitCode.OK
    assert said in capsys.readouterr().err
    assert len(served) == 1
