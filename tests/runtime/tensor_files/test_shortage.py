"""Too little memory for a file of weights is no damage of the file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.tensor_files.files import read_tensor_file


@pytest.mark.parametrize(
    ("name", "opener", "error"),
    [
        (
            "a.safetensors",
            "arrays.safe_open",
            RuntimeError("unable to mmap 4 bytes from file <a>: Cannot allocate memory (12)"),
        ),
        ("a.pth", "files.TorchFile", OSError(12, "Cannot allocate memory")),
    ],
)
def test_a_file_that_cannot_be_mapped_is_not_called_damaged(
    name: str, opener: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    save_file({"a": torch.zeros(1)}, tmp_path / name)
    monkeypatch.setattr(f"llama_adapter.runtime.tensor_files.{opener}", fail)
    with pytest.raises(type(error)) as raised:
        read_tensor_file(tmp_path / name)

    assert describe(raised.value).sentence.startswith("The memory is not enough")
