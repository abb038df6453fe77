"""The command line of the training."""

from pathlib import Path

import pytest

from scripts.train_embedded.__main__ import main


@pytest.mark.parametrize("steps", ["0", "-5"])
def test_number_of_steps_must_be_positive(steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["code", f"--steps={steps}", "--work", str(tmp_path / "work")])

    assert f"--steps must be at least 1, got {steps}" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
