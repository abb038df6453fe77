"""Checks which copy of this project runs (a checkout or an installed one), and whether that is intended.

It only reads files, and imports nothing.
"""

import importlib.metadata
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import llama_adapter
from llama_adapter.runtime.child_process import broken, ok

DISTRIBUTION = "llama-adapter"
_INSTALL = "pip install --editable ."
_HOME = Path(llama_adapter.__file__).resolve().parents[1]


def look_at_installation() -> dict[str, Any]:
    """The answer for the table of `doctor`: version, kind and folder of the installation by pip.

    It is broken if another copy runs, or if the current folder is in a checkout of this project that does not run.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ok(f"not installed, run from {_HOME}")
    kind, place = "copy", Path(str(distribution.locate_file("")))
    source = json.loads(distribution.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable"):
        kind, place = "editable", Path(url2pathname(urlsplit(source["url"]).path))
    found = f"{distribution.version}, {kind}, {place.resolve()}"
    if place.resolve() != _HOME:
        # Happens with `python -m llama_adapter` in a checkout.
        return broken(f"{found}, while {_HOME} is what runs here", hint=f"{_INSTALL} in {_HOME}")
    if (checkout := _find_checkout(Path.cwd())) not in (None, _HOME):
        hint = f"changes in {checkout} have no effect; there: {_INSTALL}"
        return broken(f"{found}, while this folder is in the checkout {checkout}", hint=hint)
    return ok(found)


def _find_checkout(folder: Path) -> Path | None:
    """The checkout of this project that contains `folder`; None if there is none."""
    for place in (folder.resolve(), *folder.resolve().parents):
        with suppress(OSError):
            if f'name = "{DISTRIBUTION}"' in (place / "pyproject.toml").read_text("utf-8", "replace").splitlines():
                return place
    return None
