"""Two runs of a command with the same --out: the second is refused before it reads or computes anything."""

from pathlib import Path

import pytest

from llama_adapter.runtime.locking import locked_output
from tests.app.command import Run


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("train", "DATA"), marks=pytest.mark.slow),
        ("eval", "DATA"),
        ("convert", "--llama-dir", "LLAMA", "--adapter", "ADAPTER"),
        ("convert", "--model", "BUNDLE", "--tensor-parallel", "2"),
        ("quantize",),
        ("pack",),
        ("export", "onnx"),
        ("export", "decoder"),
    ],
    ids=" ".join,
)
def test_a_second_run_is_refused(command: tuple[str, ...], tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.pth"
    with locked_output(out):
        ran = run(*command, "--out", str(out))
    assert ran.code == 1
    assert f"Another run is writing `{out}`" in ran.err
    assert "name another --out" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_second_calibration_is_refused(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.json"
    with locked_output(out):
        ran = run("ask", "--calibrate", "DATA", "--choices", "a,b", "--calibration-out", str(out))
    assert (ran.code, f"Another run is writing `{out}`" in ran.err) == (1, True)
