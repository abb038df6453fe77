"""Programs as modules, and pages of docs/, which are rendered from their figures."""

import json
import subprocess
import sys

import pytest
from jinja2 import UndefinedError

from scripts.common import DOCS, ROOT
from scripts.pages.render import PAGES, TEMPLATES, as_text, read, render, template_of


@pytest.mark.slow
@pytest.mark.parametrize("command", ["scripts.bench_peers --processor h100", "scripts.gpu_trace --slots 0"])
def test_a_program_is_started_as_a_module_and_ends_with_its_exit_code(command: str) -> None:
    assert subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True).returncode == 2


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_that_of_the_committed_figures(name: str) -> None:
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == render(name, read(name))


def test_every_template_has_a_page() -> None:
    assert {template_of(name) for name in PAGES} == {path.name for path in TEMPLATES.glob("*.md.jinja")}


def test_a_missing_figure_is_an_error() -> None:
    figures = read("gpu-round-h100")
    del figures["steps"][0]["seconds"]

    with pytest.raises(UndefinedError, match="seconds"):
        render("gpu-round-h100", figures)


def test_file_of_figures_has_one_line_per_series() -> None:
    content = {"a": {"b": [1, 2.5, None]}, "rows": [["x", 1], ["y", 2]], "none": {}, "empty": []}

    assert json.loads(as_text(content)) == content
    assert '  "b": [1, 2.5, null]\n' in as_text(content)
    assert '  ["y", 2]\n' in as_text(content)
