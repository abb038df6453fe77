"""LLaMA in MindSpore's `.ckpt` files with MindFormers' names, read without MindSpore."""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.mindspore import open_mindspore
from llama_adapter.llm.weights.names import LlamaSource, meta_tensors
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files import ckpt_files
from llama_adapter.runtime.tensor_files.ckpt_files import read_ckpt
from tests.llm.ckpt import write_ckpt
from tests.llm.test_sources_of_families import made
from tests.llm.toys import GOLDEN, build_decoder, drop, put

META = GOLDEN / "LLaMA" / "TINY"
NAMES = {
    "tok_embeddings.weight": "model.tok_embeddings.embedding_weight",
    "norm.weight": "model.norm_out.weight",
    "output.weight": "lm_head.weight",
}
# MindFormers uses `scaling_factor` only with an `extend_method`.
SETTINGS = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "rms_norm_eps": 1e-6, "scaling_factor": 2.0}


def write_folder(folder: Path, source: LlamaSource | None = None, *, vocab_size: int = 512, **settings: object) -> Path:
    """Write a decoder in MindFormers' form, LLaMA-TINY where none is given, with the tokenizer."""
    folder.mkdir(exist_ok=True)
    config, state = build_decoder(source or open_meta(META), None, vocab_size=vocab_size)
    parts = [meta_tensors(name, tensor, config) for name, tensor in state.items() if not name.endswith(".bias")]
    tensors = {NAMES.get(name, f"model.{name}"): tensor for part in parts for name, tensor in part.items()}
    write_ckpt(folder / "llama.ckpt", tensors.items())
    model = {name: value for name, value in {**SETTINGS, **settings}.items() if value is not None}
    (folder / "llama.yaml").write_text(yaml.safe_dump({"model": {"model_config": model}}))
    shutil.copy(GOLDEN / "LLaMA" / "tokenizer.model", folder)
    return folder


@pytest.mark.parametrize("shares_keys", [False, True])
def test_a_written_llama_is_the_one_that_it_was(shares_keys: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    source, vocab_size = open_meta(META), 512
    if shares_keys:
        made("llama", num_attention_heads=6, num_key_value_heads=2).save_pretrained(tmp_path / "theirs")
        source, vocab_size = open_huggingface(tmp_path / "theirs"), 48
        settings = {"hidden_size": 24, "num_layers": None, "num_heads": 6, "n_kv_heads": 2}
    config, wanted = build_decoder(source, None, vocab_size=vocab_size)
    folder = write_folder(tmp_path / "a", source, vocab_size=vocab_size, **settings)
    found_config, found = build_decoder(open_mindspore(folder), None, vocab_size=vocab_size)
    assert found_config == config
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


def test_tensors_of_every_kind_and_in_parts_are_read_as_written(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{shape}": torch.arange(shape.numel(), dtype=torch.float32).reshape(shape).to(dtype)
        for dtype in ckpt_files._DTYPES.values()
        for shape in (torch.Size([]), torch.Size([1]), torch.Size([7, 13]), torch.Size([3, 1, 40]))
    }
    path = tmp_path / "all.ckpt"
    write_ckpt(path, tensors.items(), part_bytes=64)
    found = read_ckpt(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    path.write_bytes(path.read_bytes() + b"crc_num" + bytes(10))
    assert read_ckpt(path).keys() == tensors.keys()


def test_cut_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_ckpt(path, [("one", torch.ones(9, 5)), ("two", torch.zeros(300, dtype=torch.float16))])
    whole, numbers = path.read_bytes(), random.Random(0)
    for length in range(1, len(whole), 5):
        path.write_bytes(whole[:length])
        try:
            assert read_ckpt(path).keys() == {"one"}  # cut exactly between the two
        except CheckpointError:
            continue
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(numbers.choice((1, 3))):
            changed[numbers.randrange(60)] = numbers.randrange(256)
        path.write_bytes(changed)
        try:
            read_ckpt(path)
        except CheckpointError:
            continue
    write_ckpt(path, [("empty", torch.empty(0, 1 << 40))])
    for content in (path.read_bytes(), b"no checkpoint at all", bytes(100), b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            read_ckpt(path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_heads": None}, "for `num_heads`"),
        ({"num_heads": 0}, "for `num_heads`"),
        ({"hidden_size": 128}, "says hidden_size 128, and the weights beside it have 64"),
        ({"num_layers": 3}, "says num_layers 3, and the weights beside it have 4"),
        ({"n_kv_heads": 2}, r"wk.* has the shape \[64, 64\], where \[32, 64\]"),
        ({"extend_method": "NTK"}, "scales its rotary embedding, which is not read from a YAML"),
        ({"extend_method": "LLAMA3"}, "scales its rotary embedding, which is not read from a YAML"),
        ({"rms_norm_eps": "x"}, "for `rms_norm_eps`"),
    ],
)
def test_settings_of_other_models_are_refused(settings: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_mindspore(write_folder(tmp_path / "a", **settings))


def edit_ckpt(edit: Callable[[dict[str, Any]], object], folder: Path) -> None:
    tensors = read_ckpt(folder / "llama.ckpt")
    edit(tensors)
    write_ckpt(folder / "llama.ckpt", tensors.items())


PROBLEMS: dict[str, Callable[[Path], object]] = {
    "two checkpoints": lambda folder: shutil.copy(folder / "llama.ckpt", folder / "rank_1.ckpt"),
    "no yaml": lambda folder: (folder / "llama.yaml").unlink(),
    "no settings": lambda folder: (folder / "llama.yaml").write_text("model: [1]\n"),
    "foreign names": partial(edit_ckpt, put("model.layers.0.attention.w_qkv.weight", torch.ones(2, 2))),
    "short": partial(edit_ckpt, drop("model.layers.3.ffn_norm.weight")),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_incomplete_folders_are_refused(problem: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    PROBLEMS[problem](folder)
    with pytest.raises(CheckpointError):
        open_mindspore(folder)
