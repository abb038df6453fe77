"""Figures of another checkout stand beside those of this one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_before
from scripts.bench_peers import load, save
from scripts.peers.results import Missing, Results, Row

OWN = Row(part="decode", engine="ours-bfloat16", size="7B", batch=1, threads=8, run="now", rates=(4.0,))
LACKING = Missing(engine="ours-int8", size="7B", section="decode", threads=8, problem="missing", reason="none")
FLAGS = ["--device", "cuda", "--sizes", "7B", "1B", "--engines", "ours-bfloat16"]
NOTHING = Results(processor="h200")


class MadeUp:
    """A benchmark that has `figures` after a while, and has ended with `code` after another, or is cut there."""

    def __init__(self, command: list[str], *, cwd: Path, figures: bool = True, code: int | None = 0) -> None:
        assert cwd == Path("other")
        start, (folder, *flags) = command[:6], command[6:]
        assert start == [sys.executable, "-m", "scripts.bench_peers", "--processor", "h200", "--out"]
        assert flags == ["--limit", "70", *FLAGS]
        self._folder, self._figures, self._code, self._num_waits = Path(folder), figures, code, 0

    def __enter__(self) -> "MadeUp":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float) -> int:
        self._num_waits += 1
        if self._num_waits == 3 and self._code is not None:
            return self._code
        if self._num_waits == 3:
            raise KeyboardInterrupt
        if self._num_waits == 2 and self._figures:
            rows = replace(OWN, run="then", rates=(2.0,)), replace(OWN, part="ceiling", engine="read", run="then")
            save(replace(NOTHING, runs={"then": {"commit": "HEAD"}}, rows=rows, missing=(LACKING,)), self._folder)
        raise subprocess.TimeoutExpired("it", timeout)


@pytest.mark.parametrize(("figures", "code"), [(True, 0), (False, 1), (True, None)])
def test_engines_of_another_checkout_are_called_before(
    figures: bool, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(command: list[str], *, cwd: Path) -> Any:
        return MadeUp(command, cwd=cwd, figures=figures, code=code)

    save(replace(NOTHING, runs={"now": {"commit": "HEAD"}}, rows=(OWN,)), tmp_path)
    monkeypatch.setattr(subprocess, "Popen", opened)
    arguments = ["abc", "other", *FLAGS, "--processor", "h200", "--limit", "90", "--out", str(tmp_path)]

    if code is None:
        with pytest.raises(KeyboardInterrupt):
            gpu_before.main(arguments)
    else:
        assert gpu_before.main(arguments) == code

    found = load(tmp_path, NOTHING)
    earlier = [("ours-bfloat16-before", "then")] if figures else []
    assert [(row.engine, row.run) for row in found.rows] == [("ours-bfloat16", "now"), *earlier]
    assert [run["commit"] for run in found.runs.values()] == ["HEAD", "abc"][: 1 + figures]
    assert found.missing == ((replace(LACKING, engine="ours-int8-before"),) if figures else ())
    page = (tmp_path / "peers-h200.md").read_text(encoding="utf-8")
    assert ("\n| ours-bfloat16-before | 2.00 |\n" in page) == figures  # ours is twice as fast
