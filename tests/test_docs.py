"""The commands of the README and of the pages in docs/ work as written, and their links lead to files and headings.

A command block after a line `<!-- run -->` is run by bash, in the order of the page, in a folder that looks like the
checkout. A `console` block after it gives the expected output. If each of its lines is an answer about another picture,
their order is free, because answers come as they are ready. Files that the commands create are removed afterwards.
`llama-adapter` is the command of tests/page_command.py.
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
PRINTS = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)  # the output of the preceding Python block
MARK = re.compile(r"^<!-- run -->", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")  # without a file: a heading of the page itself
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
BASH = re.compile(r"^ *```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PLACES = ("*.md", "docs/**/*.md", "*/decisions.md", "app/*/decisions.md")
PAGES = [path.relative_to(ROOT).as_posix() for place in PLACES for path in sorted(ROOT.glob(place))]
TRANSLATED = [page for page in PAGES if page.startswith("docs/zh/")]
# The same code on two pages is run for the first of them.
EXAMPLES = {
    ("".join(code), "".join(PRINTS.findall(text))): page
    for page, text in ((page, (ROOT / page).read_text(encoding="utf-8")) for page in reversed(PAGES))
    if page.startswith(("docs/python", "docs/coming-from-", "docs/zh/")) and (code := PYTHON.findall(text))
}
PRINTED = {
    "docs/ascend.md": '"a small red star at the left"',
    "docs/settings.md": "a small red star at the left",
}  # key: page; value: a part of what its commands print


def runnable_blocks(page: str) -> list[tuple[str, str]]:
    """The commands of each block and their expected output; "" accepts any output."""
    return BLOCK.findall(page)


def blocks_to_run() -> dict[str, list[tuple[str, str]]]:
    """The blocks by page. What a translation and an English page have is run for the latter.

    So other blocks of the translation need no files of it.
    """
    found = {page: runnable_blocks((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    english = [block for page, blocks in found.items() if page not in TRANSLATED for block in blocks]
    for page in TRANSLATED:
        found[page] = [block for block in found[page] if block not in english]
    return {page: blocks for page, blocks in found.items() if blocks}


RUN = blocks_to_run()


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, in the form that GitHub gives them.

    Letters of all scripts stay, punctuation goes, and a heading that occurs again gets a number.
    """
    names = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+?) *$", FENCED.sub("", text), re.MULTILINE)
    ]
    return {f"{name}-{again}" if (again := names[:place].count(name)) else name for place, name in enumerate(names)}


def commands(page: str) -> list[str]:
    """The commands in the blocks that are not run, without comments, line breaks and repeated spaces."""
    lines = "".join(BASH.findall(BLOCK.sub("", page))).replace("\\\n", " ").splitlines()
    shown = [" ".join(re.sub(r"(^| )#.*", "", line).split()) for line in lines]
    return [line for line in shown if line]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files of the checkout, and a `llama-adapter` command that runs them."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    programs = tmp_path / "bin"
    programs.mkdir()
    python = sys.executable
    ours = f"{python} -m tests.page_command"
    for name, command in {"python": python, "python3": python, "llama-adapter": ours}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


def compared_lines(output: str) -> list[str]:
    """The lines of an output, sorted if each is an answer about another sample picture."""
    lines = output.splitlines()
    pictures = {line.partition(": ")[0] for line in lines if line.startswith("assets/pictures/")}
    return sorted(lines) if len(pictures) == len(lines) else lines


def environment(checkout: Path) -> dict[str, str]:
    path = f"{checkout.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "expected"), EXAMPLES, ids=EXAMPLES.values())
def test_examples_of_python_print_what_the_page_says(code: str, expected: str, checkout: Path) -> None:
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
    # The port in the guide may be in use on this machine.
    for block, shown in RUN[page]:
        command = ["bash", "-euo", "pipefail", "-c", block.replace("8123", port)]
        ran = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
        assert ran.returncode == 0, f"{block}\nended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"
        assert not shown or compared_lines(shown.replace("8123", port)) == compared_lines(ran.stdout)
        printed += ran.stdout
    assert PRINTED.get(page, "") in printed
    if page == "README.md":
        assert set(checkout.iterdir()) == before, "first commands leave no files"


def test_marked_blocks_are_run_and_no_others() -> None:
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(runnable_blocks(text)) == len(MARK.findall(text)), name
    page = "```bash\nrm -r x\n```\n\n<!-- run -->\n```bash\necho a\necho b\n```\n\n```python\n1\n```\n"

    assert runnable_blocks(page) == [("echo a\necho b\n", "")]
    page = page.replace("```python\n1", "```console\na\nb")
    assert runnable_blocks(page) == [("echo a\necho b\n", "a\nb\n")]


def test_only_answers_about_several_pictures_come_in_any_order() -> None:
    first, second, again = "assets/pictures/a.png: red", "assets/pictures/b.png: blue", "assets/pictures/a.png: no"

    assert compared_lines(f"{second}\n{first}\n") == [first, second]
    for one, other in ((first, again), (second, "1 of 2"), ("b", "a")):
        assert compared_lines(f"{one}\n{other}\n") == [one, other]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page(page: str) -> None:
    file = ROOT / page
    for target, anchor in LINK.findall(file.read_text(encoding="utf-8")):
        linked = file.parent / target if target else file
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_anchors_are_those_of_github() -> None:
    page = "# `a` 全量图与增量图，B!\n\n```bash\n# comment\n```\n\n## 输出（JSON）\n\n## 输出：JSON\n"

    assert anchors(page) == {"a-全量图与增量图b", "输出json", "输出json-1"}


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_translation_has_commands_and_flags_of_the_english_pages(page: str) -> None:
    english = [(ROOT / name).read_text(encoding="utf-8") for name in PAGES if name not in TRANSLATED]
    text = (ROOT / page).read_text(encoding="utf-8")
    known = {command for other in english for command in commands(other)}
    flags = {flag for other in english for flag in FLAG.findall(other)}

    assert [command for command in commands(text) if command not in known] == []
    assert [flag for flag in FLAG.findall(BLOCK.sub("", text)) if flag not in flags] == []


def test_sizes_of_pages() -> None:
    """Pages of figures, which have a JSON file beside them, and of tables of limits and support may be longer."""
    sizes = {page: len((ROOT / page).read_bytes()) for page in PAGES if not (ROOT / page).with_suffix(".json").exists()}

    assert sizes["README.md"] <= 8192
    assert [page for page, size in sizes.items() if size > 12288] == ["docs/limits.md", "docs/support.md"]
    assert sum(size for page, size in sizes.items() if page.endswith("decisions.md")) <= 40960
