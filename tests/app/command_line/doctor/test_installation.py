"""The doctor finds out which copy of this project runs, and warns if it is not the copy in the current folder."""

import json
from importlib.metadata import PackageNotFoundError, PathDistribution
from pathlib import Path
from unittest import mock

import pytest

from llama_adapter.app.command_line.doctor import installation
from llama_adapter.runtime.child_process import broken, ok
from tests.app.golden import ROOT

INSTALL = "pip install --editable ."


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed copy, and folders beside it: of a checkout, and one with another project."""
    for name in ("site", "our checkout/inner", "theirs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "our checkout" / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "theirs" / "pyproject.toml").write_text('[project]\nname = "x"\ndescription = "of llama-adapter"\n')
    info = tmp_path / "site" / "llama_adapter-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: llama-adapter\nVersion: 0.1.0\n")
    monkeypatch.setattr(installation.importlib.metadata, "distribution", lambda name: PathDistribution(info))
    monkeypatch.chdir(tmp_path / "theirs")
    return tmp_path / "site"


def test_a_copy_is_right_except_in_a_checkout(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, checkout = f"0.1.0, copy, {site}", site.parent / "our checkout"
    assert installation.look_at_installation() == broken(
        f"{found}, while {ROOT} is what runs here", hint=f"{INSTALL} in {ROOT}"
    )
    monkeypatch.setattr(installation, "_HOME", site)
    assert installation.look_at_installation() == ok(found)
    monkeypatch.chdir(checkout / "inner")
    assert installation.look_at_installation() == broken(
        f"{found}, while this folder is in the checkout {checkout}",
        hint=f"changes in {checkout} have no effect; there: {INSTALL}",
    )


@pytest.mark.parametrize("is_editable", [True, False])
def test_an_editable_install_is_its_checkout_by_pips_notes(
    is_editable: bool, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = site.parent / "our checkout"
    notes = {"url": checkout.as_uri(), "dir_info": {"editable": True} if is_editable else {}}
    (site / "llama_adapter-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(notes))
    monkeypatch.setattr(installation, "_HOME", checkout)
    monkeypatch.chdir(checkout)

    said = installation.look_at_installation()

    assert said["state"] == ("ok" if is_editable else "broken")
    assert said["found"].startswith(f"0.1.0, editable, {checkout}" if is_editable else f"0.1.0, copy, {site}, while")


def test_without_an_installation_it_runs_from_its_folder() -> None:
    with mock.patch("importlib.metadata.distribution", side_effect=PackageNotFoundError):
        assert installation.look_at_installation() == ok(f"not installed, run from {ROOT}")
