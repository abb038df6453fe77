"""Adapter files and the decoder built from them: complete, merged exactly, and refused if anything does not fit."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.weights.adapter import AdapterFile, open_adapter
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.names import half_split
from tests.llm.toys import GOLDEN, adapter_tensors, build_decoder, drop, put, refusal

ADAPTERS = ("BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", "training-checkpoint-0")
LLAMA = open_meta(GOLDEN / "LLaMA" / "TINY")
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
    two_shards = open_meta(GOLDEN / "LLaMA" / "TINY-2SHARD")
    for llama in (two_shards, open_huggingface(GOLDEN / "LLaMA-HF" / "TINY")):
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
    huggingface = open_huggingface(GOLDEN / "LLaMA-HF" / "TINY")
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
FILES = (
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
    told |= {f"file {name}": refusal(partial(open_adapter, GOLDEN / name), tmp_path) for name in FILES}
    assert told == snapshot
