"""The tiny model, and a bundle of it."""

import shutil
from pathlib import Path

import pytest

from llama_adapter.app.models.bundle import save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from tests.app.assembled import assemble_sources
from tests.app.models.bundles import SOURCES


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return assemble_sources(SOURCES)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, model: LoadedModel) -> Path:
    """A bundle of the tiny model. Tests must not change it."""
    return save_bundle(tmp_path_factory.mktemp("saved") / "bundle", model=model)


@pytest.fixture
def bundle(tmp_path: Path, saved: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "bundle"))
