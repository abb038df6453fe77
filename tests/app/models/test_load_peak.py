"""Loading needs little more memory than the loaded model: layers are read, converted and packed one at a time."""

import json
import shutil
import subprocess
import sys
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


# Floats are packed alike from every source; Meta's files are converted on the way to 8 bits too.
MODELS = [("random", "int8"), ("bundle", "float"), ("bundle", "int8"), ("meta", "int8")]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """The memory that each of `MODELS` takes, in bytes."""
    if find_library().library is None:
        pytest.skip(find_library().reason)
    sources = {"random": "random"}
    for kind, write in (("bundle", write_bundle), ("meta", write_meta)):
        sources[kind] = write(tmp_path_factory.mktemp(kind))
    flags = [word for kind, precision in MODELS for word in (sources[kind], precision)]
    command = [sys.executable, "-m", "tests.app.models.load_peak", "float32", *flags]
    ran = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return dict(zip(MODELS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize(("kind", "precision"), MODELS)
def test_the_peak_is_little_more_than_what_stays(
    kind: str, precision: str, taken: dict[tuple[str, str], dict[str, Any]]
) -> None:
    found = taken[kind, precision]
    assert found["peak"] <= FACTOR * found["stays"] + SLACK, found
