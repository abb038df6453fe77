"""We can read MindSpore's `.ckpt` files, and MindSpore can read ours."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
import torch

from llama_adapter.runtime.tensor_files.ckpt_files import read_ckpt
from tests.llm.ckpt import write_ckpt
from tests.llm.test_mindspore_weights import write_folder

ARRAYS = {
    "model.layers.0.attention.wq.weight": np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32),
    "half": np.arange(10, dtype=np.float16),
    "count": np.arange(3, dtype=np.int64),
    "one": np.array(3.5, dtype=np.float32),
}


@pytest.mark.parametrize("has_checksum", [False, True])
def test_files_of_mindspore_are_read(has_checksum: bool, tmp_path: Path) -> None:
    path = tmp_path / "theirs.ckpt"
    listed = [{"name": name, "data": mindspore.Tensor(array)} for name, array in ARRAYS.items()]
    mindspore.save_checkpoint(listed, str(path), append_dict={"note": "a text", "step": 3}, crc_check=has_checksum)
    found = read_ckpt(path)
    for name, array in ARRAYS.items():
        assert found[name].numpy().dtype == array.dtype
        assert np.array_equal(found[name].numpy(), array)


def test_mindspore_reads_ours(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "llama") / "llama.ckpt"
    theirs = mindspore.load_checkpoint(str(path))
    ours = read_ckpt(path)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(parameter.asnumpy(), ours[name].numpy()) for name, parameter in theirs.items())
    write_ckpt(tmp_path / "b.ckpt", [("b", torch.ones(2, 3, dtype=torch.bfloat16))])
    assert mindspore.load_checkpoint(str(tmp_path / "b.ckpt"))["b"].dtype == mindspore.bfloat16
