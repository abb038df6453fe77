"""Checks which copy of this project runs (a checkout or an installed one), and whether that is intended.

It only reads files, and imports nothing.
"""

import importlib.metadata
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

import llama_adapter
from llama_adapter.runtime.child_process import broken, ok

DISTRIBUTION = "llama-adapter"
_INSTALL = "pip install --editable ."
_HOME = Path(llama_adapter.__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """The installation by pip: version, kind, and the folder that contains its packages."""

    version: str
    kind: Literal["editable", "copy"]
    place: Path


def find_installed() -> Installed | None:
    """The installation of this project by pip; None if the project is not installed."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    source = json.loads(distribution.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable"):
        place = Path(url2pathname(urlsplit(source["url"]).path))
        return Installed(version=distribution.version, kind="editable", place=place.resolve())
    place = Path(str(distribution.locate_file("")))
    return Installed(version=distribution.version, kind="copy", place=place.resolve())


def find_checkout(folder: Path) -> Path | None:
    """The checkout of this project that contains `folder`; None if there is none."""
    for place in (folder, *folder.parents):
        try:
            project = tomllib.loads((place / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        except (OSError, ValueError):
            continue
        if project.get("name") == DISTRIBUTION:
            return place
    return None


def judge_installation(installed: Installed | None, *, running: Path, checkout: Path | None) -> dict[str, Any]:
    """The answer for the table of `doctor`.

    `running` is the folder of the packages in use. `checkout` is the checkout that contains the current folder.
    """
    if installed is None:
        return ok(f"not installed, run from {running}")
    found = f"{installed.version}, {installed.kind}, {installed.place}"
    if installed.place != running:
        # Happens with `python -m llama_adapter` in a checkout.
        return broken(f"{found}, while {running} is what runs here", hint=f"{_INSTALL} in {running}")
    if checkout not in (None, running):
        hint = f"changes in {checkout} have no effect; there: {_INSTALL}"
        return broken(f"{found}, while this folder is in the checkout {checkout}", hint=hint)
    return ok(found)


def look_at_installation() -> dict[str, Any]:
    """`judge_installation` for this process and its current folder."""
    try:
        checkout = find_checkout(Path.cwd().resolve())
    except FileNotFoundError:  # the folder is gone
        checkout = None
    return judge_installation(find_installed(), running=_HOME, checkout=checkout)
