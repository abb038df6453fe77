"""LLaMA folders: all forms of one model give the same decoder, and damaged or foreign folders are refused."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.names import SplitTensor
from tests.llm.toys import GOLDEN, build_decoder, drop, is_mapped, put, refusal

ONE_SHARD = GOLDEN / "LLaMA" / "TINY"
TWO_SHARDS = GOLDEN / "LLaMA" / "TINY-2SHARD"
HUGGINGFACE = GOLDEN / "LLaMA-HF" / "TINY"
SHARD = "consolidated.00.pth"


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ONE_SHARD, tmp_path / "meta"))


def edit_tensors(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = torch.load(path, weights_only=True)
    edit(tensors)
    torch.save(tensors, path)


def edit_json(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def state_of(source: Any) -> dict[str, Tensor]:
    return build_decoder(source, None, vocab_size=512)[1]


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def huggingface_tensors() -> dict[str, Tensor]:
    return {
        key: tensor for file in sorted(HUGGINGFACE.glob("*.safetensors")) for key, tensor in load_file(file).items()
    }


def write_huggingface(folder: Path, *, kind: str, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    shutil.copy(HUGGINGFACE / "config.json", folder)
    edit_json(folder / "config.json", **config)
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif kind == "joined safetensors":  # the index of the shards is left
        save_file(tensors, folder / "model.safetensors")
        names = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = {key: f"pytorch_model-0000{1 + index % 2}-of-00002.bin" for index, key in enumerate(tensors)}
        for name in set(names.values()):
            torch.save({key: tensor for key, tensor in tensors.items() if names[key] == name}, folder / name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "joined safetensors", "bin", "sharded bin"])
def test_huggingface_file_forms_give_the_same_model(tmp_path: Path, kind: str) -> None:
    tensors = huggingface_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}  # in old files
    folder = write_huggingface(tmp_path / "hf", kind=kind, tensors=tensors)
    assert_equal(state_of(open_huggingface(folder)), state_of(open_meta(ONE_SHARD)))


def as_part(before: str, *, head: str) -> dict[str, Tensor]:
    """The tensors under the names that they have in a model with other parts."""
    return {
        head if name == "lm_head.weight" else name.replace("model.", before, 1): tensor
        for name, tensor in huggingface_tensors().items()
    }


@pytest.mark.parametrize(
    ("before", "head"),
    [("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")],
)
@pytest.mark.parametrize("kind", ["safetensors", "sharded bin"])
def test_the_llama_in_a_model_that_sees_pictures(tmp_path: Path, kind: str, before: str, head: str) -> None:
    tensors = as_part(before, head=head)
    others = {"vision_tower.position_ids": torch.arange(4), "multi_modal_projector.linear_1.bias": torch.ones(2)}
    config = json.loads((HUGGINGFACE / "config.json").read_text())
    folder = write_huggingface(
        tmp_path / "llava", kind=kind, tensors=tensors | others, model_type="llava", text_config=config, hidden_size=7
    )

    assert_equal(state_of(open_huggingface(folder)), state_of(open_meta(ONE_SHARD)))


@pytest.mark.parametrize(
    "kept", [("model.embed_tokens.weight", "lm_head.weight"), ("model.embed_tokens.weight",), ("lm_head.weight",)]
)
def test_tied_tensors_are_those_of_the_file_and_copies(tmp_path: Path, kept: tuple[str, ...]) -> None:
    tensors = {  # in the dtype that the model gets
        key: tensor.float()
        for key, tensor in huggingface_tensors().items()
        if key in kept or key.startswith(("model.layers", "model.norm"))
    }
    folder = write_huggingface(tmp_path / "hf", kind="safetensors", tensors=tensors, tie_word_embeddings=True)
    state = state_of(open_huggingface(folder))
    assert torch.equal(state["embedding.weight"], tensors[kept[0]])
    assert torch.equal(state["head.weight"], tensors[kept[-1]])
    assert state["head.weight"].data_ptr() != state["embedding.weight"].data_ptr()


@pytest.mark.parametrize("are_equal", [True, False], ids=["equal", "other dtype"])
def test_tied_tensors_that_the_file_has_twice_are_not_read_when_it_is_opened(
    are_equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = huggingface_tensors()
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head if are_equal else head.float()
    folder = write_huggingface(tmp_path / "hf", kind="safetensors", tensors=tensors, tie_word_embeddings=True)
    with monkeypatch.context() as patch:
        patch.setattr(SplitTensor, "read", lambda *_: pytest.fail("a tensor was read"))
        source = open_huggingface(folder)
    assert source.tensors["output.weight"].dtype == tensors["lm_head.weight"].dtype
    state = state_of(source)
    assert torch.equal(state["head.weight"], state["embedding.weight"])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_tensors_are_memory_mapped() -> None:
    source = open_meta(ONE_SHARD)
    assert is_mapped(source.tensors["layers.0.attention.wq.weight"].read(), ONE_SHARD / SHARD)
    source = open_huggingface(HUGGINGFACE)
    weight = source.tensors["layers.0.attention.wq.weight"].read()
    assert is_mapped(weight, HUGGINGFACE / "model-00001-of-00002.safetensors")


def test_harmless_params_are_tolerated_and_weights_wrapped_by_a_trainer(meta: Path) -> None:
    edit_json(meta / "params.json", n_kv_heads=4, ffn_dim_multiplier=1.3, max_seq_len=2048, use_scaled_rope=False)
    edit_json(meta / "params.json", rope_theta=None)
    torch.save({"model": torch.load(meta / SHARD, weights_only=True), "epoch": 3}, meta / SHARD)
    assert_equal(state_of(open_meta(meta)), state_of(open_meta(ONE_SHARD)))


TENSORS: dict[str, Callable[[dict[str, Any]], object]] = {  # changes to the only shard
    **{
        f"without {key}": drop(key)
        for key in ("layers.1.attention.wk.weight", "norm.weight", "output.weight", "layers.0.ffn_norm.weight")
    },
    **{
        f"number as {key}": put(key, torch.zeros(()))
        for key in ("layers.0.feed_forward.w1.weight", "output.weight", "layers.0.attention.wq.weight")
    },
    "unknown tensor": put("layers.0.attention.wz.weight", torch.ones(2)),
    "many missing tensors": lambda t: [t.pop(key) for key in list(t) if ".w2." in key or "norm" in key],
    "wrong shape": put("layers.2.attention.wo.weight", torch.ones(64, 60)),
    "integers": put("norm.weight", torch.ones(64, dtype=torch.int64)),
}
PARAMS: dict[str, dict[str, object]] = {
    "more layers": {"n_layers": 40},
    "another width": {"dim": 5120},
    "shared keys": {"n_kv_heads": 2},
    "experts": {"num_experts": 8},
    "no heads": {"n_heads": None},
    "odd heads": {"n_heads": 3},
    "no whole numbers": {"n_layers": 2.7, "dim": float("inf")},
    "not finite": {"norm_eps": float("nan")},
    "text as number": {"rope_theta": "x"},
    "zero base": {"rope_theta": 0},
}
CONFIGS: dict[str, dict[str, object]] = {
    "experts": {"model_type": "mixtral"},
    "an unknown architecture": {"model_type": ["llama"]},
    "shared keys": {"num_key_value_heads": 2},
    "heads that differ by layer": {"num_key_value_heads": [4, 4, 2, 4]},
    "rope_scaling": {"rope_scaling": {"type": "spiral", "factor": 2.0}},
    "rope_parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
    "too few factors": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
    "no factors": {"rope_scaling": {"type": "longrope", "short_factor": "x", "long_factor": None}},
    "yarn of nothing": {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0},
    "biases": {"attention_bias": True},
    "a text as a flag": {"mlp_bias": "no"},
    "windows of an unknown kind": {"model_type": "qwen3", "layer_types": ["chunked"] * 4},
    "windows of too few layers": {"model_type": "gemma2", "layer_types": ["full_attention"]},
    "embeddings of texts": {"model_type": "gemma3_text", "use_bidirectional_attention": True},
    "embeddings of texts, as transformers 5 says": {"is_causal": False},
    "Granite 4": {"model_type": "granitemoehybrid"},
    "quantised": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantised by MLX": {"quantization": {"group_size": 64, "bits": 4}},
    "activation": {"hidden_act": "gelu"},
    "zero base": {"rope_theta": 0},
    "rope_parameters as text": {"rope_parameters": "x"},
    "no heads": {"num_attention_heads": 0, "num_key_value_heads": 0},
    "many layers": {"num_hidden_layers": 10**9},
    "another width": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8},
}
FILES: dict[str, Callable[[Path], object]] = {  # changes to a folder with two shards
    "last shard missing": lambda two: (two / "consolidated.01.pth").unlink(),
    "first shard missing": lambda two: (two / SHARD).unlink(),
    "shard too many": lambda two: shutil.copy(two / SHARD, two / "consolidated.02.pth"),
    "shards of two models": lambda two: edit_tensors(two / "consolidated.01.pth", lambda t: t["norm.weight"].add_(1)),
    "shard copied over another": lambda two: shutil.copy(two / SHARD, two / "consolidated.01.pth"),
    "adapter as shard": lambda two: shutil.copy(GOLDEN / "adapters" / "BIAS-TINY.pth", two / SHARD),
    "CLIP as shard": lambda two: shutil.copy(GOLDEN / "CLIP" / "tiny-vit-torchscript.pt", two / SHARD),
    "broken params.json": lambda two: (two / "params.json").write_text("{"),
}


def test_refusals_of_meta_folders(tmp_path: Path, snapshot: Any) -> None:
    edits: dict[str, Callable[[Path], object]] = {
        **{name: partial(edit_tensors, edit=edit) for name, edit in TENSORS.items()},
        **{f"params: {name}": partial(edit_json, **entries) for name, entries in PARAMS.items()},
    }
    told = {}
    for number, (name, edit) in enumerate(edits.items()):
        folder = Path(shutil.copytree(ONE_SHARD, tmp_path / f"{number}"))
        edit(folder / ("params.json" if name.startswith("params") else SHARD))
        told[name] = refusal(lambda folder=folder: state_of(open_meta(folder)), folder)
    for name, change in FILES.items():
        folder = Path(shutil.copytree(TWO_SHARDS, tmp_path / name))
        change(folder)
        told[name] = refusal(lambda folder=folder: open_meta(folder), folder)
    wrong_tokenizer = partial(build_decoder, open_meta(ONE_SHARD), None, vocab_size=32000)
    told["tokenizer of another size"] = refusal(wrong_tokenizer, ONE_SHARD)
    assert told == snapshot


def test_refusals_of_huggingface_folders(tmp_path: Path, snapshot: Any) -> None:
    told = {}

    def refused(name: str, folder: Path) -> None:
        told[name] = refusal(lambda: open_huggingface(folder), folder)

    own = json.loads((HUGGINGFACE / "config.json").read_text())
    parts: dict[str, dict[str, object]] = {
        "part: another architecture": {"text_config": own | {"model_type": "qwen2_moe"}},
        "part: quantised": {"text_config": own, "quantization_config": {"bits": 4}},
        "part: no tensor of it": {"text_config": own},
    }
    for name, entries in {**CONFIGS, **{name: {"model_type": "llava", **part} for name, part in parts.items()}}.items():
        folder = Path(shutil.copytree(HUGGINGFACE, tmp_path / name))
        edit_json(folder / "config.json", **entries)
        refused(name, folder)
    (folder / "config.json").write_text("[]")
    refused("config.json without an object", folder)
    folder = Path(shutil.copytree(HUGGINGFACE, tmp_path / "shard"))
    (folder / "model-00001-of-00002.safetensors").unlink()
    refused("missing shard", folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    refused("no weights", folder)
    (folder / "adapter_config.json").write_text("{}")
    refused("a LoRA with a config.json", folder)
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "missing tensor": drop("model.layers.2.mlp.up_proj.weight"),
        "unknown tensor": put("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
        "integers": put("model.norm.weight", torch.ones(64, dtype=torch.int8)),
        "names without head and layers": lambda tensors: [
            put(key.replace("model.", "").replace("layers", "h"), tensors.pop(key))(tensors) for key in [*tensors]
        ],
        "names of a wrapper": lambda tensors: [put("module." + key, tensors.pop(key))(tensors) for key in [*tensors]],
    }
    for name, edit in edits.items():
        tensors = huggingface_tensors()
        edit(tensors)
        refused(name, write_huggingface(tmp_path / name, kind="safetensors", tensors=tensors))
    twice = {f"{before}.norm.weight": torch.ones(64) for before in ("model.language_model", "language_model.model")}
    part = {"model_type": "llava", "text_config": own}
    refused("part: twice", write_huggingface(tmp_path / "twice", kind="bin", tensors=twice, **part))
    part = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    tensors = as_part("model.language_model.", head="lm_head.weight")
    folder = write_huggingface(tmp_path / "left out", kind="bin", tensors=tensors, **part)
    refused("part: sizes of the first LLaMA left out", folder)
    assert told == snapshot
