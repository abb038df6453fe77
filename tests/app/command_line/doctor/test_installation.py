"""The doctor finds out which copy of this project runs, and warns if it is not the copy in the current folder."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.command_line.doctor.installation import (
    Installed,
    find_checkout,
    find_installed,
    judge_installation,
)
from tests.app.golden import ROOT

CHECKOUT, OTHER, SITE = Path("/checkout"), Path("/other"), Path("/site-packages")
EDITABLE = Installed(version="0.1.0", kind="editable", place=CHECKOUT)
COPY = Installed(version="0.1.0", kind="copy", place=SITE)


def test_what_runs_and_whether_it_is_intended(snapshot: SnapshotAssertion) -> None:
    cases: list[tuple[Installed | None, Path, Path | None]] = [
        (EDITABLE, CHECKOUT, CHECKOUT),
        (EDITABLE, CHECKOUT, None),
        (COPY, SITE, None),
        (None, CHECKOUT, CHECKOUT),
        # A different copy than the one in the current folder.
        (COPY, SITE, CHECKOUT),
        (EDITABLE, CHECKOUT, OTHER),
        (COPY, CHECKOUT, CHECKOUT),
    ]
    judged = [judge_installation(one, running=running, checkout=checkout) for one, running, checkout in cases]
    assert "\n".join("{state}: {found} [{hint}]".format(**one) for one in judged) == snapshot


def install(site: Path, direct_url: dict[str, Any] | None) -> None:
    """Write the files of an installed package that the doctor reads."""
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
def test_editable_installs_and_copies_are_told_apart_by_pips_notes(
    direct_url: dict[str, Any] | None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, direct_url)
    distribution = PathDistribution(tmp_path / "llama_adapter-0.1.0.dist-info")
    monkeypatch.setattr(
        "llama_adapter.app.command_line.doctor.installation.importlib.metadata.distribution", lambda name: distribution
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
def test_a_copy_run_in_the_checkout_is_a_warning(tmp_path: Path) -> None:
    install(tmp_path, None)
    ignored = shutil.ignore_patterns("__pycache__", "embedded", "*.png", "*.jpg")
    shutil.copytree(ROOT / "llama_adapter", tmp_path / "llama_adapter", ignore=ignored)
    # Like the program that pip installs, this one does not search the current folder for packages. Only one row is
    # examined.
    program = """
import sys
from llama_adapter.app.command_line.main import main
from llama_adapter.app.command_line.doctor import command, environment
command.look_at_environment = lambda: [environment._probe("llama-adapter", environment.look_at_installation())]
sys.exit(main(["doctor", "--environment"]))
"""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environ, cwd=ROOT)
    told = " ".join(ran.stdout.split())

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"llama-adapter warning 0.1.0, copy, {tmp_path}" in told
    assert f"changes in {ROOT} have no effect" in told
    assert "no errors, 1 warning in 1 check" in told
