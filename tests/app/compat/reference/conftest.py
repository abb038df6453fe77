"""A fixture for programs that `run-reference` runs."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_adapter.app.command_line.main import main
from tests.app.command import Ran

Program = Callable[..., Ran]


@pytest.fixture
def program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs a program's source with the command, in this process, from a folder that is not the program's."""

    def program(source: str, *arguments: str, flags: tuple[str, ...] = ("--device", "cpu")) -> Ran:
        (tmp_path / "programs").mkdir(exist_ok=True)
        (tmp_path / "programs" / "program.py").write_text(source)
        before = sys.argv, list(sys.path), sys.modules["__main__"]
        code = main(["run-reference", *flags, "programs/program.py", *arguments])
        assert (sys.argv, sys.path, sys.modules["__main__"]) == before
        assert not [name for name in sys.modules if name.partition(".")[0] in ("llama", "mindformers")]
        return Ran(code, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLAMA_ADAPTER_HOME", raising=False)
    return program
