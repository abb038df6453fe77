"""The commands of the README work as they are written.

A block of commands that follows a line `<!-- run -->` is run by bash, in the order of the page, in a folder that looks
like the checkout; what the commands write there is gone afterwards.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^<!-- run -->\s*\n```bash\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- run -->", re.MULTILINE)


def runnable_blocks(page: str) -> list[str]:
    return BLOCK.findall(page)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of the checkout under their names, and a `llama-adapter` that runs them."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in {
        "python": sys.executable,
        "llama-adapter": f"{sys.executable} -m llama_adapter",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_commands_of_the_readme_work(checkout: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = runnable_blocks(page)
    assert blocks, "README.md has no block of commands marked `<!-- run -->`"
    environment = {
        **os.environ,
        "PATH": f"{checkout.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    for block in blocks:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=checkout, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{block}\nended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"


def test_every_mark_in_the_readme_has_its_block() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")

    assert len(runnable_blocks(page)) == len(MARK.findall(page)) > 0


def test_only_marked_blocks_are_run() -> None:
    page = "```bash\nrm -r x\n```\n\n<!-- run -->\n```bash\necho a\necho b\n```\n\n```python\n1\n```\n"

    assert runnable_blocks(page) == ["echo a\necho b\n"]
