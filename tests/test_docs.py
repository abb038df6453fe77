"""The commands of the README and of the pages in docs/ work as written, and their links lead to files and headings.

A block of commands that follows a line `<!-- run -->` is run by bash, in the order of the page, in a folder that looks
like the checkout; a block `console` behind it says what it prints. What the commands write there is removed afterwards.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"^<!-- run -->\s*\n```bash\n(.*?)^```[ ]*$(?:\s*\n```console\n(.*?)^```[ ]*$)?", re.MULTILINE | re.DOTALL
)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)  # what the Python above prints
MARK = re.compile(r"^<!-- run -->", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#([^)]+))?\)")
PAGES = [
    path.relative_to(ROOT).as_posix() for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
]
RUN = [page for page in PAGES if MARK.search((ROOT / page).read_text(encoding="utf-8"))]
PRINTED = {
    "docs/ascend.md": '"a small red star at the left"',
    "docs/settings.md": "a small red star at the left",
}  # part of what the commands of a page print


def runnable_blocks(page: str) -> list[tuple[str, str]]:
    """The commands of each block, and what they print; "" for anything."""
    return BLOCK.findall(page)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as the repository's host makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    python = sys.executable
    for name, command in {"python": python, "python3": python, "llama-adapter": f"{python} -m llama_adapter"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


def environment(checkout: Path) -> dict[str, str]:
    path = f"{checkout.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["docs/python.md", "docs/coming-from.md"])
def test_examples_of_python_print_what_the_page_says(name: str, checkout: Path) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    code, expected = "".join(PYTHON.findall(page)), "".join(PRINTS.findall(page))
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == expected != ""


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page(page: str, checkout: Path) -> None:
    printed = ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    before = set(checkout.iterdir())
    # The port in the guide may be taken here.
    for block, shown in runnable_blocks((ROOT / page).read_text(encoding="utf-8").replace("8123", port)):
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=checkout,
            env=environment(checkout),
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, f"{block}\nended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"
        assert shown in ("", ran.stdout)
        printed += ran.stdout
    assert PRINTED.get(page, "") in printed
    if page == "README.md":
        assert set(checkout.iterdir()) == before, "first commands leave no files"


def test_marked_blocks_are_run_and_no_others() -> None:
    for name in RUN:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(runnable_blocks(text)) == len(MARK.findall(text)) > 0, name
    page = "```bash\nrm -r x\n```\n\n<!-- run -->\n```bash\necho a\necho b\n```\n\n```python\n1\n```\n"

    assert runnable_blocks(page) == [("echo a\necho b\n", "")]
    page = page.replace("```python\n1", "```console\na\nb")
    assert runnable_blocks(page) == [("echo a\necho b\n", "a\nb\n")]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page(page: str) -> None:
    place = (ROOT / page).parent
    for target, anchor in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        assert (place / target).exists(), target
        if anchor:
            assert anchor in anchors(place / target), f"{target}#{anchor}"


def test_size_of_the_readme() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8192
