"""The fingerprint that distinguishes models on several machines without reading them completely."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from llama_adapter.app.models.parallel.fingerprint import files_fingerprint
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from tests.app.golden import model_options


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden LLaMA's folder."""
    return shutil.copytree(str(model_options()["llama_dir"]), tmp_path / "LLaMA")


def fingerprint(llama: Path | str, *, adapter: str = "BIAS-TINY", llama_type: str = "TINY") -> str:
    spec = CaptionerSpec(**model_options(adapter, llama_type=llama_type) | {"llama_dir": str(llama)})
    model, _ = stream_model(spec, dtype=torch.float32)
    return files_fingerprint(model, spec)


def test_a_copy_is_the_same_at_any_place_and_time(folder: Path) -> None:
    os.utime(folder / "TINY" / "consolidated.00.pth", (0, 0))
    assert fingerprint(folder) == fingerprint(model_options()["llama_dir"])


@pytest.mark.parametrize("change", ["one matrix", "another adapter", "other files"])
def test_another_model_differs(change: str, folder: Path) -> None:
    """Ranks also compare norms, but these come from the adapter and do not detect another LLaMA."""
    ours = fingerprint(folder)
    options = {"adapter": "LORA-BIAS-TINY"} if change == "another adapter" else {}
    options |= {"llama_type": "TINY-2SHARD"} if change == "other files" else {}
    if change == "one matrix":
        file = folder / "TINY" / "consolidated.00.pth"
        tensors = torch.load(file, weights_only=True)
        tensors["layers.2.feed_forward.w2.weight"].neg_()
        torch.save(tensors, file)
    assert fingerprint(folder, **options) != ours
