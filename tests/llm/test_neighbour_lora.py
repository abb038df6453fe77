"""LoRA of MindFormers and PaddleNLP: the same changes as the same factors in a folder of PEFT."""

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_adapter import CheckpointError
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.lora import open_loras
from llama_adapter.runtime.tensor_files.ckpt_files import read_ckpt
from llama_adapter.runtime.tensor_files.paddle_files import read_pdparams
from tests.llm.ckpt import write_ckpt

CONFIG = DecoderConfig(vocab_size=40, dim=16, num_layers=2, num_heads=4, ffn_dim=24, norm_eps=1e-6)
# Hugging Face's name of a module, MindFormers' name, inputs and outputs.
MODULES = [
    ("model.layers.0.self_attn.q_proj", "model.layers.0.attention.wq", 16, 16),
    ("model.layers.1.self_attn.v_proj", "model.layers.1.attention.wv", 16, 16),
    ("model.layers.1.mlp.down_proj", "model.layers.1.feed_forward.w2", 24, 16),
    ("lm_head", "lm_head", 16, 40),
]
RANK, ALPHA = 3, 7
FACTORS = [(torch.randn(RANK, inputs), torch.randn(outputs, RANK)) for _, _, inputs, outputs in MODULES]


def peft(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [name for name, *_ in MODULES]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for (name, *_), (a, b) in zip(MODULES, FACTORS, strict=True):
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")


def paddle(folder: Path, **config: Any) -> None:
    (folder / "lora_config.json").write_text(
        json.dumps({"r": RANK, "lora_alpha": ALPHA, "lora_plus_scale": 1, **config})
    )
    values: dict[str, Any] = {}
    for (name, *_), (a, b) in zip(MODULES, FACTORS, strict=True):
        module = name.replace("model.", "llama.", 1)
        values |= {f"{module}.lora_A": np.asfortranarray(a.T.numpy()), f"{module}.lora_B": b.T.contiguous().numpy()}
    values["StructuredToParameterName@@"] = {"a": "b"}
    (folder / "lora_model_state.pdparams").write_bytes(pickle.dumps(values, protocol=4))


def unified(folder: Path) -> None:
    """PaddleNLP's folder, with two shards of a unified checkpoint."""
    paddle(folder)
    values = read_pdparams(folder / "lora_model_state.pdparams")
    (folder / "lora_model_state.pdparams").unlink()
    for number, names in enumerate((list(values)[:3], list(values)[3:]), start=1):
        shard = {name: values[name].contiguous() for name in names}
        save_file(shard, folder / f"peft_model-0000{number}-of-00002.safetensors")


def mindformers(folder: Path, **config: Any) -> None:
    lines = {"pet_type": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, **config}
    pet = "".join(f"      {name}: {value}\n" for name, value in lines.items() if value is not None)
    (folder / "run.yaml").write_text(f"model:\n  model_config:\n    num_heads: 4\n    pet_config:\n{pet}")
    tensors = [("model.norm_out.weight", torch.ones(16))]  # of the base model
    for (_, name, *_), (a, b) in zip(MODULES, FACTORS, strict=True):
        tensors += [(f"{name}.mindpet_delta_lora_a", a), (f"{name}.mindpet_delta_lora_b", b)]
    write_ckpt(folder / "rank_0.ckpt", tensors)


def opened(folder: Path, write: Callable[..., None], **config: Any) -> Any:
    folder.mkdir(exist_ok=True)
    write(folder, **config)
    return open_loras([f"{folder}=0.5"], CONFIG)[0]


def renamed(folder: Path, *, name: str) -> None:
    """As `unified`, of a model whose decoder has another name."""
    unified(folder)
    for file in folder.glob("*.safetensors"):
        save_file({key.replace("llama", name): one for key, one in load_file(file).items()}, file)


DECODERS = [partial(renamed, name=name) for name in ("mistral", "gemma", "qwen2", "qwen3", "model", "model.llama")]


@pytest.mark.parametrize("write", [paddle, mindformers, unified, *DECODERS])
def test_the_changes_are_those_of_peft(write: Callable[..., None], tmp_path: Path) -> None:
    wanted, found = opened(tmp_path / "peft", peft), opened(tmp_path / "other", write)

    assert (found.weight, len(found.files)) == (0.5, 2 if write in (paddle, mindformers) else 3)
    assert found.changes.keys() == wanted.changes.keys()
    weight = torch.randn(40, 16)
    for name, change in found.changes.items():
        assert change.scale == wanted.changes[name].scale == ALPHA / RANK
        assert torch.equal(change.left_OR, wanted.changes[name].left_OR)
        assert torch.equal(change.right_RI, wanted.changes[name].right_RI)
    # Equal factors with other strides may be multiplied in another order, which rounds differently.
    applied = [one.changes["output.weight"].applied(weight) for one in (found, wanted)]
    torch.testing.assert_close(
        *applied, rtol=0, atol=8 * torch.finfo(torch.float32).eps * float(applied[1].abs().max())
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (None, "has `peft_model-00002-of-00002.safetensors`: shards are missing"),
        ("peft_model-00001-of-00003.safetensors", "or they are of several"),
        ("peft_model.safetensors", "or they are of several"),
        ("peft_model-00002-of-00002.safetensors", "lora_A` twice"),
    ],
    ids=["missing", "stale", "beside one file", "the same"],
)
def test_shards_are_those_of_one_checkpoint(other: str | None, said: str, tmp_path: Path) -> None:
    unified(tmp_path)
    first = tmp_path / "peft_model-00001-of-00002.safetensors"
    if other is None:
        first.unlink()
    else:
        shutil.copy(first, tmp_path / other)
    with pytest.raises(CheckpointError, match=said):
        open_loras([str(tmp_path)], CONFIG)


@pytest.mark.parametrize("write", [paddle, mindformers])
def test_a_lora_of_a_larger_model_gets_no_remedy_of_peft(write: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"has 4 tensors that do not .*layers\.1") as caught:
        open_loras([str(tmp_path)], dataclasses.replace(CONFIG, num_layers=1))
    assert caught.value.hint == "the folder is damaged, or was trained on another model or on fused matrices"


@pytest.mark.parametrize("name", ["vision_model", "visual", "mtp", "model.mtp"])
def test_factors_beside_the_decoder_of_paddlenlp_are_refused(name: str, tmp_path: Path) -> None:
    renamed(tmp_path, name=name)
    with pytest.raises(CheckpointError, match=rf"has 6 tensors that do not belong there \(`{name}\.layers\.0"):
        open_loras([str(tmp_path)], CONFIG)


@pytest.mark.parametrize(
    ("contained", "said", "hint"),
    [
        (("folded",), "factors of its family", "as --llama-dir"),
        (("scales",), "scales of its adapter", "as --llama-dir, and its adapter as --adapter"),
        (("folded", "scales"), "scales of its adapter and factors of its family", "its adapter as --adapter"),
    ],
)
def test_factors_in_a_bundle_take_no_lora(contained: tuple[str, ...], said: str, hint: str, tmp_path: Path) -> None:
    peft(tmp_path)
    assert open_loras([], CONFIG, contained=contained, name="mine") == ()
    with pytest.raises(
        CheckpointError, match=f"^The weights of the bundle `mine` contain {said}, so no LoRA"
    ) as caught:
        open_loras([str(tmp_path)], CONFIG, contained=contained, name="mine")
    assert caught.value.hint.endswith(hint)


@pytest.mark.parametrize(
    ("module", "kind", "shape", "is_hinted"),
    [
        ("lm_head", "lora_B", (48, RANK), True),
        ("lm_head", "lora_B", (40, RANK + 1), False),
        ("lm_head", "lora_A", (RANK, 8), False),
        ("lm_head", "lora_A", (RANK + 1, 16), False),
        ("model.layers.0.self_attn.q_proj", "lora_B", (24, RANK), False),
    ],
)
def test_another_number_of_rows_may_be_padding_that_a_bundle_lacks(
    module: str, kind: str, shape: tuple[int, ...], is_hinted: bool, tmp_path: Path
) -> None:
    peft(tmp_path)
    tensors = load_file(path := tmp_path / "adapter_model.safetensors")
    save_file(tensors | {f"base_model.model.{module}.{kind}.weight": torch.ones(shape)}, path)
    with pytest.raises(CheckpointError, match="has the shape") as caught:
        open_loras([str(tmp_path)], CONFIG, contained=())
    assert ("rows of padding, which a bundle lacks" in caught.value.hint) == is_hinted


def test_factors_of_other_modules_of_mindformers_are_named(tmp_path: Path) -> None:
    mindformers(tmp_path)
    tensors = read_ckpt(tmp_path / "rank_0.ckpt")
    fused = {name.replace("attention.wq", "attention.w_qkv"): tensor for name, tensor in tensors.items()}
    write_ckpt(tmp_path / "rank_0.ckpt", fused.items())
    with pytest.raises(CheckpointError, match=r"do not belong there \(`model\.layers\.0\.attention\.w_qkv\.lora_A`"):
        open_loras([str(tmp_path)], CONFIG)


def test_paddle_s_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    found = opened(tmp_path, paddle, rslora=True)
    assert {change.scale for change in found.changes.values()} == {ALPHA / RANK**0.5}


@pytest.mark.parametrize(
    ("write", "config", "said"),
    [
        (paddle, {"lora_alpha": None}, "`lora_alpha`, where a number is wanted"),
        (paddle, {"r": 4}, "lora_"),
        (paddle, {"trainable_bias": "lora"}, "sets `trainable_bias`, which is not supported"),
        (paddle, {"pissa": True}, "sets `pissa`, which is not supported"),
        (mindformers, {"lora_rank": None}, "`r`, where a whole number"),
        (mindformers, {"pet_type": "ptuning"}, "no `pet_config` of type lora"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    write: Callable[..., None], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        opened(tmp_path, write, **config)


class Calls:
    """Its pickle calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("called",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Calls()),
        pickle.dumps({"a": Calls()}),
        pickle.dumps([1]),
        pickle.dumps({"a": 1}),
        pickle.dumps({"a": np.array(["text"])}),
        pickle.dumps({"a": np.ones(3)})[:-9],
        pickle.dumps(dict.fromkeys("abcdefgh", np.ones(100))),  # one array under many names
        b"\x80\x04r\xff\xff\xff\xff.",  # a memo of 4 billion entries
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes that the file does not have
        b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.",  # 4 GB that the file does not have
        *(
            b"\x80\x04" + form % (b")" + b"\x85" * 500_000)
            for form in (b"}%bNs.", b"(%bNd.", b"(%b\x91.", b"%b\x8f\x94.")
        ),
        pickle.dumps({"a": np.ones(2)}).replace(b"f8", b"f9"),
        pickle.dumps({"a": np.ones((2, 3))}).replace(b"K\x02K\x03\x86", b"\x8c\x01aK\x03\x86"),  # a shape with a text
        b"text",
    ],
)
def test_a_pickle_is_data(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdparams").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read_pdparams(tmp_path / "a.pdparams")
    assert not (tmp_path / "called").exists()


def test_numbers_of_16_bits_are_bfloat16(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({"a": values.view(torch.uint16).numpy()}))
    assert torch.equal(read_pdparams(tmp_path / "a.pdparams")["a"], values)
