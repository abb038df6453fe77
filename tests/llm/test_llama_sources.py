"""LLaMA folders and adapters: all forms of one model give the same decoder, and damaged or foreign ones are refused."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.weights.adapter import AdapterFile, open_adapter
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.names import SplitTensor, half_split
from tests.llm.toys import GOLDEN, adapter_tensors, build_decoder, drop, is_mapped, put, refusal

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
    "half a pair": {"partial_rotary_factor": 0.7},
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


# Adapter files and the decoder built from them: complete, merged exactly, and refused if anything does not fit

ADAPTERS = ("BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", "training-checkpoint-0")
LLAMA = open_meta(ONE_SHARD)
HEADS, DIM = 4, 64

Edit = Callable[[dict[str, Any]], object]


def adapter_path(name: str) -> Path:
    return GOLDEN / "adapters" / f"{name}.pth"


def edited(tmp_path: Path, name: str, edit: Edit, **entries: object) -> AdapterFile:
    """The adapter with its tensors changed by `edit`, written to a separate file."""
    tensors: dict[str, Any] = adapter_tensors(name)
    edit(tensors)
    path = tmp_path / "adapter.pth"
    torch.save({"model": tensors, **entries}, path)
    return open_adapter(path)


def build(adapter: AdapterFile | None, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    return build_decoder(LLAMA, adapter, vocab_size=512, **options)


@pytest.mark.parametrize("name", [*ADAPTERS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_adapters_give_the_whole_state_of_the_decoder(name: str | None, dtype: torch.dtype) -> None:
    adapter = None if name is None else open_adapter(adapter_path(name))
    if adapter is not None and name is not None:  # every tensor has one owner
        assert len(adapter.llama) + len(adapter.visual) + len(adapter.clip) + 1 == len(adapter_tensors(name))
    config, state = build(adapter, context=40, dtype=dtype)
    LlamaAdapterDecoder(config).load_state_dict(state, strict=True)
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert (config.num_adapter_layers, config.num_queries) == ((3, 10) if name else (0, 0))
    assert config.separate_adapter_kv == (name == "LORA-BIAS-TINY")
    assert config.context == 40


@pytest.mark.parametrize("name", ADAPTERS)
def test_all_forms_of_llama_give_the_same_decoder(name: str) -> None:
    adapter = open_adapter(adapter_path(name))
    wanted = build(adapter)
    two_shards = open_meta(TWO_SHARDS)
    for llama in (two_shards, open_huggingface(HUGGINGFACE)):
        config, state = build_decoder(llama, adapter, vocab_size=512)
        assert config == wanted[0]
        assert [key for key in state if not torch.equal(state[key], wanted[1][key])] == []


def keep_one_query(tensors: dict[str, Any]) -> None:
    tensors["visual_query.weight"] = tensors["visual_query.weight"][:1]
    tensors["adapter_query.weight"] = tensors["adapter_query.weight"][:3]


def drop_new_gates(tensors: dict[str, Any]) -> None:
    for key in [key for key in tensors if key.endswith("new_gate")]:
        tensors.pop(key)


@pytest.mark.parametrize(("edit", "num_queries"), [(keep_one_query, 1), (drop_new_gates, 10)])
def test_new_gate_is_ignored_with_a_single_query_and_1_if_missing(tmp_path: Path, edit: Edit, num_queries: int) -> None:
    declared = {"w_bias": True, "w_lora": True, "lora_rank": 999}  # the rank is read from the tensors
    config, state = build(edited(tmp_path, "LORA-BIAS-TINY", edit, config=declared))
    gate = adapter_tensors("LORA-BIAS-TINY")["llama.layers.3.attention.gate"].float().view(HEADS)
    assert (config.num_queries, config.separate_adapter_kv) == (num_queries, True)
    assert torch.equal(state["adapter.gates"][2], gate.tanh())


def test_llama_tensors_of_a_trainer_checkpoint_override_the_folder(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("tok_embeddings", "layers.1.attention.wk", "layers.1.attention.wv", "output"):
            tensors[f"llama.{name}.weight"] = tensors[f"llama.{name}.weight"] + 1

    adapter = edited(tmp_path, "training-checkpoint-0", change)
    huggingface = open_huggingface(HUGGINGFACE)
    for llama in (LLAMA, huggingface):  # the checkpoint's q and k rows are in Meta's order for both kinds of folder
        _, state = build_decoder(llama, adapter, vocab_size=512)
        wk = adapter.llama["layers.1.attention.wk.weight"].float()
        assert torch.equal(state["layers.1.attention.qkv.weight"][DIM : 2 * DIM], half_split(wk, HEADS))
        assert torch.equal(state["embedding.weight"], adapter.llama["tok_embeddings.weight"].float())
        assert torch.equal(state["head.weight"], adapter.llama["output.weight"].float())


def rename(tensors: dict[str, Any]) -> None:
    for key in [key for key in tensors if key.startswith("llama.")]:
        tensors["llma." + key.removeprefix("llama.")] = tensors.pop(key)


@pytest.mark.parametrize(
    ("name", "edit"),
    [("training-checkpoint-0", rename), ("BIAS-TINY", drop("llama.layers.0.attention.gate"))],
    ids=["names of older trainers", "no gate of a layer without adapter"],
)
@pytest.mark.parametrize("is_plain", [True, False])
def test_other_forms_of_an_adapter_give_the_same_decoder(tmp_path: Path, name: str, edit: Edit, is_plain: bool) -> None:
    adapter = edited(tmp_path, name, edit, epoch=0, args=Namespace(batch_size=4))
    if is_plain:
        tensors = adapter_tensors(name)
        edit(tensors)
        torch.save(tensors, tmp_path / "plain.pth")
        adapter = open_adapter(tmp_path / "plain.pth")
    state, wanted = build(adapter)[1], build(open_adapter(adapter_path(name)))[1]
    assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == []


def to_meta(key: str) -> Edit:
    return lambda tensors: tensors.update({key: tensors[key].to("meta")})


def flatten_low_rank(tensors: dict[str, Any]) -> None:
    tensors |= {key: torch.zeros(()) for key in tensors if key.endswith("_l1.weight")}


MISSING = {  # each may be missing only together with all tensors of its kind
    "BIAS-TINY": (
        *("llama.layers.2.attention.gate", "llama.layers.0.feed_forward.w2.bias", "llama.norm.weight"),
        *("llama.layers.3.ffn_norm.weight", "visual_query.weight"),
    ),
    "LORA-BIAS-TINY": ("llama.layers.1.attention.lora_wk_l2.weight", "llama.layers.1.attention.new_gate"),
    "CAPTION-TINY": ("llama.layers.2.attention.gate",),
    "training-checkpoint-0": ("llama.layers.1.attention.wv.weight", "llama.output.weight"),
}
UNKNOWN = ("llama.layers.1.attention.wk.bias", "llama.layers.1.surprise", "visual_thing.weight")
MISFITS: dict[str, tuple[str, Edit]] = {
    "another width": ("BIAS-TINY", put("adapter_query.weight", torch.ones(30, 5120))),
    "more layers": ("CAPTION-TINY", put("llama.layers.9.attention.gate", torch.ones(1, 4, 1, 1))),
    "wrong shape": ("BIAS-TINY", put("llama.layers.1.attention.gate", torch.ones(1, 32, 1, 1))),
    "numbers as low-rank factors": ("LORA-BIAS-TINY", flatten_low_rank),
    "queries that do not divide": ("BIAS-TINY", put("adapter_query.weight", torch.ones(31, DIM))),
    **{
        f"{key} without values": ("BIAS-TINY", to_meta(key))
        for key in ("llama.layers.1.attention.wq.bias", "clip_proj.bias", "adapter_query.weight")
    },
}
NO_ADAPTERS = (
    *("LLaMA/TINY/consolidated.00.pth", "LLaMA-HF/TINY/model-00001-of-00002.safetensors"),
    *("CLIP/tiny-vit-torchscript.pt", "LLaMA/tokenizer.model", "LLaMA", "absent.pth"),
)


def test_refusals_of_adapters(tmp_path: Path, snapshot: Any) -> None:
    edits = {f"{name} without {key}": (name, drop(key)) for name, keys in MISSING.items() for key in keys}
    edits |= {f"{name} with {key}": (name, put(key, torch.ones(DIM))) for name in ADAPTERS for key in UNKNOWN}
    told = {
        case: refusal(lambda name=name, edit=edit: build(edited(tmp_path, name, edit)), tmp_path)
        for case, (name, edit) in {**edits, **MISFITS}.items()
    }
    for name, declared in (("CAPTION-TINY", {"w_bias": True, "w_lora": False}), ("BIAS-TINY", {"w_lora": True})):
        given = partial(edited, tmp_path, name, lambda _: None, config=declared)
        told[f"{name} declares {declared}"] = refusal(lambda given=given: build(given()), tmp_path)
    told |= {f"file {name}": refusal(partial(open_adapter, GOLDEN / name), tmp_path) for name in NO_ADAPTERS}
    assert told == snapshot
