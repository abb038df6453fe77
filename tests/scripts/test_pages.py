"""Pages of docs/ are rendered from their figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from scripts.common import DOCS
from scripts.pages.render import PAGES, TEMPLATES, read, render, save_part, template_of


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_that_of_the_committed_figures(name: str) -> None:
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == render(name, read(name))


def test_every_template_has_a_page() -> None:
    assert {template_of(name) for name in PAGES} == {path.name for path in TEMPLATES.glob("*.md.jinja")}


def test_a_missing_figure_is_an_error() -> None:
    figures = read("own-pictures")
    del figures["accuracy"]["rows"][0]["seconds"]

    with pytest.raises(UndefinedError, match="seconds"):
        render("own-pictures", figures)


def test_a_part_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    figures = read("own-pictures")
    for part in reversed(figures):
        save_part("own-pictures", part, figures[part], tmp_path)

    assert json.loads((tmp_path / "own-pictures.json").read_text(encoding="utf-8")) == figures
    assert (tmp_path / "own-pictures.md").read_text(encoding="utf-8") == render("own-pictures", figures)


def test_a_part_that_was_not_measured_says_so() -> None:
    assert render("own-pictures", {}).count("Not measured yet.") == 4


@pytest.mark.parametrize(("load", "is_busy"), [([3.0, 0.2, 0.2], True), ([0.2, 3.0, 3.0], False), (None, False)])
def test_a_busy_machine_is_noted(load: Any, is_busy: bool) -> None:
    figures = read("service")
    figures["circumstances"] |= {"load_before": load, "num_cpus": 2}

    assert ("The machine was busy" in render("service", figures)) == is_busy


def test_a_stage_that_was_stopped_shows_how_far_it_came() -> None:
    figures = read("embedded-model")
    figures["training"]["stages"]["code"] |= {"steps": 1200, "num_steps": 4700}

    assert "| code | 1,200 of 4,700 |" in render("embedded-model", figures)
