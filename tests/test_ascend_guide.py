"""docs/ascend.md says what the program does: its commands are accepted, and its errors are those of the program."""

import ast
import functools
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import demo_bsz
from app.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
PROGRAMS = ("llama-adapter", "python scripts/pth2onnx.py", "python demo_bsz.py")


def commands() -> list[str]:
    """The commands of this project in the guide's blocks, without comments and line breaks."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith(PROGRAMS)]


def messages() -> list[str]:
    """What the table of failures says that a user reads."""
    table = GUIDE.partition("| what happened |")[2].partition("\n\n")[0]
    cells = [line.split("|")[2] for line in table.splitlines()[2:]]
    return [cell.split("`")[1] for cell in cells]


def parsers() -> dict[str, Callable[[list[str]], Any]]:
    export = runpy.run_path(str(ROOT / "scripts" / "pth2onnx.py"))["build_parser"]()
    makers = (build_parser().parse_args, export.parse_args, demo_bsz.parser().parse_args)
    return dict(zip(PROGRAMS, makers, strict=True))


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_guide_is_accepted(command: str) -> None:
    program = next(name for name in PROGRAMS if command.startswith(name))

    parsers()[program](shlex.split(command.removeprefix(program), comments=True))


def test_the_guide_shows_all_steps() -> None:
    text = "\n".join(commands())

    assert all(program in text for program in PROGRAMS)
    assert "export om" in text
    assert "doctor --environment" in text


@functools.cache
def texts_of_the_program() -> set[str]:
    """All texts in our sources, those inside f-strings piece by piece, without quotation marks."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for package in ("app", "llm", "vision")
        for path in (ROOT / package).rglob("*.py")
    ]
    found = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text.replace("`", "").strip() for text in found if isinstance(text, str)}


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_guide_is_one_of_the_programs(message: str) -> None:
    if message.startswith("Failed to load the backend extension"):  # torch's own
        return
    # Dots stand for what differs from case to case.
    fragments = [part.strip() for part in message.split("...") if len(part.strip()) >= 11]
    texts = texts_of_the_program()

    assert any(part in text for part in fragments for text in texts) or any(
        text in message for text in texts if len(text) >= 11
    )


def test_all_rows_of_the_failures_are_looked_at() -> None:
    assert len(messages()) >= 25
