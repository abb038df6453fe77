"""Fixtures of the tests of `app`."""

import pytest

from llama_adapter.app.command_line.main import main
from tests.app.command import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | list[str]) -> Ran:
        flat = [part for given in arguments for part in ([given] if isinstance(given, str) else given)]
        if flat[0] in ("caption", "ask") and "--reader" not in flat:
            flat += ["--reader", "thread"]  # starting reader processes takes longer than these tests' work
        code = main(flat)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Ran(code, out, err)

    return run
