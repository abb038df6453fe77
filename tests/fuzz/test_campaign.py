"""A campaign ends in time, reports its results, and keeps its corpus."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.golden import ROOT

pytestmark = pytest.mark.slow


def fuzz(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command line, with its own place for what it keeps."""
    command = [sys.executable, "-m", "tests.fuzz", *arguments, "--folder", str(folder), "--by-outcome"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_campaign_counts_its_inputs_and_keeps_new_ones(tmp_path: Path) -> None:
    ran = fuzz("run", "--minutes", "0.2", "--target", "wire-reply", folder=tmp_path)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    row = next(line for line in ran.stdout.splitlines() if line.startswith("| wire-reply | outcome"))
    assert int(row.split("|")[4].replace(",", "")) > 20
    assert list((tmp_path / "wire-reply" / "corpus").iterdir())


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    ran = fuzz("run", "--target", "nothing", folder=tmp_path)

    assert ran.returncode == 2
    assert "wire-reply" in ran.stderr
