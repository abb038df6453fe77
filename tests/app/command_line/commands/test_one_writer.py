"""Two runs of a command with the same --out: the second is refused before it reads or computes anything."""

from pathlib import Path

import pytest

from llama_adapter.runtime.locking import locked_output
from tests.app.command import Run


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("train DATA --out", marks=pytest.mark.slow),
        "eval DATA --out",
        "convert --llama-dir LLAMA --adapter ADAPTER --out",
        "convert --model BUNDLE --tensor-parallel 2 --out",
        "quantize --out",
        "pack --out",
        "export onnx --out",
        "export decoder --out",
        "ask --calibrate DATA --choices a,b --calibration-out",
    ],
)
def test_a_second_run_is_refused(command: str, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.pth"
    with locked_output(out):
        ran = run(*command.split(), str(out))
    assert ran.code == 1
    assert f"Another run is writing `{out}`" in ran.err
    assert "name another --out" in ran.err
    assert list(tmp_path.iterdir()) == []
