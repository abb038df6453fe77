"""Loading needs little more memory than the loaded model: layers are read, converted and packed one at a time."""

import functools
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.models import random_model
from llama_adapter.app.models.bundle import save_bundle
from llama_adapter.app.models.random_model import decoder_config
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.weights.names import llama_shapes
from llama_adapter.runtime.kernels.library import find_library
from tests.app.models.load_peak import NAME, SIZE, VISION

pytestmark = pytest.mark.slow

FACTOR = 1.1
SLACK = 20_000_000  # bytes for modules that are imported during loading
REPOSITORY = Path(__file__).parents[3]


def write_bundle(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "LLAMA_SIZES", {NAME: SIZE})
        model = random_model.random_model(NAME, dtype=torch.float16, vision=VISION)
    return f"model={save_bundle(folder / 'bundle', model=model)}"


def llama(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors under Meta's names; `folder` gets the tokenizer."""
    shutil.copyfile(embedded_model() / "tokenizer.model", folder / "tokenizer.model")
    return {name: torch.randn(shape).mul_(0.02).half() for name, shape in llama_shapes(decoder_config(SIZE)).items()}


def write_meta(folder: Path) -> str:
    torch.save(llama(folder), folder / "consolidated.00.pth")
    params = {"dim": SIZE.dim, "n_layers": SIZE.num_layers, "n_heads": SIZE.num_heads, "norm_eps": 1e-6}
    (folder / "params.json").write_text(json.dumps({**params, "multiple_of": 256, "vocab_size": -1}))
    return f"llama_dir={folder}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], str]:
    """A source for `load_peak` by its kind. Its files are written once."""
    return functools.cache(lambda kind: kind if kind == "random" else kind(tmp_path_factory.mktemp("source")))


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("random", "int8"), *itertools.product((write_bundle, write_meta), ("float", "int8"))],
)
def test_the_peak_is_little_more_than_what_stays(kind: Any, precision: str, source: Callable[[Any], str]) -> None:
    if find_library().library is None:
        pytest.skip(find_library().reason)
    command = [sys.executable, "-m", "tests.app.models.load_peak", source(kind), "float32", precision]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    taken = json.loads(ran.stdout.splitlines()[-1])

    assert taken["peak"] <= FACTOR * taken["stays"] + SLACK, taken
