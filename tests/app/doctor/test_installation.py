"""The doctor tells which copy of this project runs, and warns where it is another one than a user thinks."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.doctor.installation import Installed, find_checkout, find_installed, judge_installation
from tests.app.golden import ROOT

CHECKOUT, OTHER, SITE = Path("/checkout"), Path("/other"), Path("/site-packages")
EDITABLE = Installed(version="0.1.0", kind="editable", place=CHECKOUT)
COPY = Installed(version="0.1.0", kind="copy", place=SITE)


@pytest.mark.parametrize(
    ("installed", "running", "checkout", "found"),
    [
        (EDITABLE, CHECKOUT, CHECKOUT, "0.1.0, editable, /checkout"),
        (EDITABLE, CHECKOUT, None, "0.1.0, editable, /checkout"),
        (COPY, SITE, None, "0.1.0, copy, /site-packages"),
        (None, CHECKOUT, CHECKOUT, "not installed, run from /checkout"),
    ],
)
def test_what_runs_is_told(installed: Installed | None, running: Path, checkout: Path | None, found: str) -> None:
    assert judge_installation(installed, running=running, checkout=checkout) == ("ok", found, "")


@pytest.mark.parametrize(
    ("installed", "running", "checkout", "found"),
    [
        (COPY, SITE, CHECKOUT, "copy, /site-packages, while this folder is in the checkout /checkout"),
        (EDITABLE, CHECKOUT, OTHER, "editable, /checkout, while this folder is in the checkout /other"),
        (COPY, CHECKOUT, CHECKOUT, "copy, /site-packages, while /checkout is what runs here"),
    ],
)
def test_another_copy_than_the_one_in_sight_is_warned_of(
    installed: Installed, running: Path, checkout: Path, found: str
) -> None:
    state, told, hint = judge_installation(installed, running=running, checkout=checkout)

    assert state == "broken"
    assert told.endswith(found)
    assert "pip install --editable ." in hint
    assert str(checkout) in hint


def install(site: Path, direct_url: dict[str, Any] | None) -> None:
    """What pip leaves of a package, as far as it is asked for."""
    info = site / "llama_adapter-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: llama-adapter\nVersion: 0.1.0\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))


@pytest.mark.parametrize(
    ("direct_url", "kind"),
    [
        ({"url": "file:///a%20checkout", "dir_info": {"editable": True}}, "editable"),
        ({"url": "file:///a%20checkout", "dir_info": {}}, "copy"),
        (None, "copy"),
    ],
)
def test_pips_own_notes_tell_editable_installs_from_copies(
    direct_url: dict[str, Any] | None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, direct_url)
    distribution = PathDistribution(tmp_path / "llama_adapter-0.1.0.dist-info")
    monkeypatch.setattr(
        "llama_adapter.app.doctor.installation.importlib.metadata.distribution", lambda name: distribution
    )
    place = Path("/a checkout") if kind == "editable" else tmp_path.resolve()

    assert find_installed() == Installed(version="0.1.0", kind=kind, place=place)  # type: ignore[arg-type]


def test_a_checkout_is_known_by_its_project_file(tmp_path: Path) -> None:
    for name, text in {
        "ours": '[project]\nname = "llama-adapter"\n',
        "theirs": '[project]\nname = "x"\n',
        "broken": "]",
    }.items():
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").write_text(text)

    assert find_checkout(tmp_path / "ours" / "inner") == tmp_path / "ours"
    assert find_checkout(tmp_path / "theirs" / "inner") is None
    assert find_checkout(tmp_path / "broken") is None
    assert find_checkout(ROOT / "docs") == ROOT


@pytest.mark.slow
def test_a_copy_that_runs_inside_the_checkout_is_a_warning_of_the_doctor(tmp_path: Path) -> None:
    install(tmp_path, None)
    ignored = shutil.ignore_patterns("__pycache__", "embedded", "pictures")
    shutil.copytree(ROOT / "llama_adapter", tmp_path / "llama_adapter", ignore=ignored)
    # As the program that pip writes: the current folder is not where packages are looked for. One row is looked at.
    program = """
import sys
from llama_adapter.app.cli import main
from llama_adapter.app.doctor import command, environment
command.look_at_environment = lambda: [environment._installation()]
sys.exit(main(["doctor", "--environment"]))
"""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environ, cwd=ROOT)
    told = " ".join(ran.stdout.split())

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"llama-adapter warning 0.1.0, copy, {tmp_path}" in told
    assert f"changes in {ROOT} have no effect" in told
    assert "no errors, 1 warning in 1 check" in told
