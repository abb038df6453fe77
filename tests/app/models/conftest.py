"""The tiny model, and bundles of it and of the embedded model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_adapter.app.models.bundle import save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.runtime.schemes import Precision
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


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Precision], Path]:
    """The embedded model's bundle with a precision, made at first use. Tests must not change it."""
    folder = tmp_path_factory.mktemp("embedded")

    def bundle(precision: Precision) -> Path:
        if precision == "float":
            return embedded_model()
        target = folder / precision
        return target if target.exists() else quantise_bundle(QuantiseJob(out=str(target), precision=precision))

    return bundle
