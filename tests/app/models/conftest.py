"""The tiny model, and a bundle of it."""

from pathlib import Path

import pytest

from llama_adapter.app.models.bundle import save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel, assemble_sources
from tests.app.models.bundles import SOURCES


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return assemble_sources(SOURCES)


@pytest.fixture
def bundle(tmp_path: Path, model: LoadedModel) -> Path:
    return save_bundle(tmp_path / "bundle", model=model)
