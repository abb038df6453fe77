"""Shared code of benchmarks, and pages of docs/, which are rendered from their figures."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import pytest
from jinja2 import UndefinedError

from scripts.bench import parse_settings, run_bench
from scripts.common import DOCS, ROOT, in_fresh_process, in_turn
from scripts.pages.render import PAGES, TEMPLATES, read, render, save_part, template_of


@dataclass(frozen=True)
class Settings:
    seconds: Annotated[float, ""] = 2.5
    clients: Annotated[tuple[int, ...], ""] = (1, 8)
    other: str = "kept"


FULL, QUICK = Settings(), Settings(seconds=0.5, clients=(1,))


def parsed(*arguments: str) -> tuple[Settings, Path | None]:
    return parse_settings("", arguments, page="x", full=FULL, quick=QUICK)[:2]


def test_flags_replace_fields_and_a_quick_run_writes_only_into_a_given_folder(tmp_path: Path) -> None:
    assert parsed() == (FULL, DOCS)
    assert parsed("--clients", "2", "3") == (Settings(clients=(2, 3)), DOCS)
    assert parsed("--quick", "--seconds", "1") == (Settings(seconds=1.0, clients=(1,)), None)
    assert parsed("--quick", "--out", str(tmp_path / "new")) == (QUICK, tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_chosen_parts_are_measured_and_written_with_their_circumstances(tmp_path: Path) -> None:
    parts = {name: lambda settings, name=name: {"seconds": settings.seconds, "is": name} for name in "ab"}
    flags = ["--quick", "--out", str(tmp_path), "--part", "b"]

    found = run_bench("", flags, measure=parts, page="own-pictures", packages=["numpy"], full=FULL, quick=QUICK)

    assert found == read("own-pictures", tmp_path)
    assert found.keys() == {"b"}
    assert (found["b"]["seconds"], found["b"]["is"]) == (0.5, "b")
    assert {"python", "numpy"} <= found["b"]["circumstances"]["versions"].keys()


def test_packages_of_a_part_are_wanted_for_it_alone_and_before_the_first_part() -> None:
    measured: list[str] = []
    parts = {name: lambda settings, name=name: measured.append(name) or {} for name in "ab"}
    options: dict[str, Any] = {"measure": parts, "page": "own-pictures", "packages": {"b": ["no-such-package"]}}

    found = run_bench("", ["--quick", "--part", "a"], **options, full=FULL, quick=QUICK)
    with pytest.raises(metadata.PackageNotFoundError, match="no-such-package"):
        run_bench("", ["--quick"], **options, full=FULL, quick=QUICK)

    assert (list(found), measured) == (["a"], ["a"])


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--seconds", "nan"], ["--clients", "1", "-1"]])
def test_values_that_are_not_above_0_are_usage_errors(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*flags)
    assert ended.value.code == 2


def test_every_way_is_measured_once_in_each_round() -> None:
    order: list[str] = []

    assert in_turn("ab", lambda way: order.append(way) or len(order), rounds=2) == {"a": [1, 3], "b": [2, 4]}  # type: ignore[func-returns-value]
    assert order == ["a", "b", "a", "b"]


def test_a_fresh_process_is_another_one() -> None:
    assert in_fresh_process(os.getpid) != os.getpid()


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
