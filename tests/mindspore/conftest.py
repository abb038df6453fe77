"""Fixtures for MindIR graphs."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).resolve().parents[1] / "fakes" / "mindspore_lite"


@pytest.fixture
def mslite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for MindSpore Lite, with one Ascend device."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("FAKE_ASCENDS", "1")
    yield importlib.import_module("mindspore_lite")
    del sys.modules["mindspore_lite"]
