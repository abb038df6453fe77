"""The fakes of ais_bench and ATC, in place of the real ones."""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.graphs.toolkit import find_atc

FAKES = Path(__file__).resolve().parents[2] / "fakes" / "ais_bench"
MODULES = ("ais_bench", "aclruntime")


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith(MODULES)]:
        del sys.modules[name]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts folders of the fakes on the path, in place of any that were there before."""

    def put(*folders: str) -> None:
        forget()
        for folder in folders:
            monkeypatch.syspath_prepend(str(FAKES / folder))

    level, handlers = logging.root.level, list(logging.root.handlers)
    yield put
    forget()
    # If a test imported the fake itself, the settings of its `basicConfig` must be undone.
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers


@pytest.fixture
def atc(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in for ATC, which the commands find too."""
    return use_atc(monkeypatch)


def use_atc(patch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in for ATC, and the Python that it needs, first on PATH; returns its path."""
    patch.setenv("PATH", os.pathsep.join((str(FAKES.parent), str(Path(sys.executable).parent), os.environ["PATH"])))
    return find_atc()


@pytest.fixture
def acl(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake `aclruntime` module; its ais_bench can be imported too."""
    for name in [name for name in os.environ if name.startswith("FAKE_")]:
        monkeypatch.delenv(name)
    install("")
    return importlib.import_module("aclruntime")
