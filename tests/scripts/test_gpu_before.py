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


@pytest.mark.parametrize("code", [0, 1])
def test_engines_of_another_checkout_are_called_before(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Row(part="decode", engine="ours-bfloat16", size="7B", batch=1, threads=8, run="now", rates=(4.0,))
    nothing = Results(processor="h200")
    save(replace(nothing, runs={"now": {}}, rows=(own,)), tmp_path)

    def run(command: list[str], *, cwd: Path) -> Any:
        assert cwd == Path("other")
        start, folder, flags = command[:6], command[6], command[7:]
        assert start == [sys.executable, "-m", "scripts.bench_peers", "--processor", "h200", "--out"]
        assert flags == ["--device", "cuda", "--sizes", "7B", "1B", "--engines", "ours-bfloat16", "--limit", "30"]
        if code == 0:
            lacking = Missing(engine="hf", size="7B", section="decode", threads=8, problem="missing", reason="none")
            ceiling = replace(own, part="ceiling", engine="read", run="then")
            rows = replace(own, run="then", rates=(2.0,)), ceiling
            save(replace(nothing, runs={"then": {}}, rows=rows, missing=(lacking,)), Path(folder))
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    flags = "--device cuda --processor h200 --sizes 7B 1B --engines ours-bfloat16 --limit 30"

    assert gpu_before.main(["other", *flags.split(), "--out", str(tmp_path)]) == code

    found = load(tmp_path, nothing)
    earlier = [("ours-bfloat16-before", "then")] if code == 0 else []
    assert [(row.engine, row.run) for row in found.rows] == [("ours-bfloat16", "now"), *earlier]
    assert found.missing == ()
    page = (tmp_path / "peers-h200.md").read_text(encoding="utf-8")
    assert ("\n| ours-bfloat16-before | 2.00 |\n" in page) == (code == 0)  # ours is twice as fast
