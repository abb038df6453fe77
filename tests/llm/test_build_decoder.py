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
from tests.bounds import sums
from tests.llm.toys import GOLDEN, adapter_tensors, build_decoder, drop, put, refusal

ADAPTERS = ("BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", "training-checkpoint-0")
LLAMA = open_meta(GOLDEN / "LLaMA" / "TINY")
HEADS, DIM, FFN, LAYERS, QUERIES = 4, 64, 192, 4, 10


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


def meta_row(row: int, heads: int = HEADS, dim: int = DIM) -> int:
    """Meta's row for one of our rows: within a head of size d, our row s * d/2 + i is Meta's row 2 i + s."""
    size = dim // heads
    head, within = divmod(row, size)
    s, i = divmod(within, size // 2)
    return head * size + 2 * i + s


ORDER = torch.tensor([meta_row(row) for row in range(DIM)])


@pytest.mark.parametrize("name", [*ADAPTERS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_adapters_give_the_whole_state_of_the_decoder(name: str | None, dtype: torch.dtype) -> None:
    adapter = None if name is None else open_adapter(adapter_path(name))
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


@pytest.mark.parametrize("layer", [0, 2])
def test_merged_lora_equals_the_low_rank_products(layer: int) -> None:
    tensors, (_, state) = adapter_tensors("LORA-BIAS-TINY"), build(open_adapter(adapter_path("LORA-BIAS-TINY")))
    generator = torch.Generator().manual_seed(7)
    x = {DIM: torch.randn(5, DIM, generator=generator), FFN: torch.randn(5, FFN, generator=generator)}

    def unmerged(matrix: str) -> Tensor:  # in float64
        group, name = matrix.split(".")
        weight = LLAMA.tensors[f"layers.{layer}.{matrix}.weight"].read().double()
        l1, l2 = (tensors[f"llama.layers.{layer}.{group}.lora_{name}_l{i}.weight"].double() for i in (1, 2))
        inputs = x[weight.shape[1]].double()
        bias = tensors.get(f"llama.layers.{layer}.{matrix}.bias", torch.zeros(weight.shape[0]))
        return inputs @ weight.T + (inputs @ l1.T) @ l2.T + bias

    q, k, v = (unmerged(f"attention.{name}") for name in ("wq", "wk", "wv"))
    gate_up = torch.cat([unmerged("feed_forward.w1"), unmerged("feed_forward.w3")], dim=1)
    for module, exact in (
        ("attention.qkv", torch.cat([q[:, ORDER], k[:, ORDER], v], dim=1)),
        ("attention.out", unmerged("attention.wo")),
        ("feed_forward.gate_up", gate_up),
        ("feed_forward.down", unmerged("feed_forward.w2")),
    ):
        weight, bias = state[f"layers.{layer}.{module}.weight"], state[f"layers.{layer}.{module}.bias"]
        merged = x[weight.shape[1]] @ weight.T + bias
        assert bool(((merged - exact).abs() <= sums(x[weight.shape[1]], weight, bias)).all()), module


def test_adapter_keeps_keys_and_values_without_lora() -> None:
    _, state = build(open_adapter(adapter_path("LORA-BIAS-TINY")))
    for j in range(3):
        wk, wv = (LLAMA.tensors[f"layers.{j + 1}.attention.{name}.weight"].read().float() for name in ("wk", "wv"))
        assert torch.equal(state[f"adapter.kv.{j}.weight"], torch.cat([wk[ORDER], wv]))
        assert not torch.equal(state[f"layers.{j + 1}.attention.qkv.weight"][DIM:], state[f"adapter.kv.{j}.weight"])


@pytest.mark.parametrize("name", ["BIAS-TINY", "LORA-BIAS-TINY"])
def test_gates_of_the_last_layers_are_folded(name: str) -> None:
    tensors, (_, state) = adapter_tensors(name), build(open_adapter(adapter_path(name)))
    for j in range(3):
        prefix = f"llama.layers.{j + 1}.attention."
        new_gate = float(tensors.get(f"{prefix}new_gate", torch.ones(1)))
        assert torch.equal(state["adapter.gates"][j], tensors[f"{prefix}gate"].float().view(HEADS).tanh() * new_gate)
    assert torch.equal(state["adapter.queries"].view(30, DIM), tensors["adapter_query.weight"])


def test_new_gate_is_ignored_with_a_single_query(tmp_path: Path) -> None:
    def keep_one_query(tensors: dict[str, Tensor]) -> None:
        tensors["visual_query.weight"] = tensors["visual_query.weight"][:1]
        tensors["adapter_query.weight"] = tensors["adapter_query.weight"][:3]

    config, state = build(edited(tmp_path, "LORA-BIAS-TINY", keep_one_query))
    gate = adapter_tensors("LORA-BIAS-TINY")["llama.layers.3.attention.gate"].float().view(HEADS)
    assert config.num_queries == 1
    assert torch.equal(state["adapter.gates"][2], gate.tanh())


def test_missing_new_gates_are_one(tmp_path: Path) -> None:
    without = edited(tmp_path, "LORA-BIAS-TINY", lambda t: [t.pop(key) for key in list(t) if key.endswith("new_gate")])
    gate = adapter_tensors("LORA-BIAS-TINY")["llama.layers.3.attention.gate"].float().view(HEADS)
    assert torch.equal(build(without)[1]["adapter.gates"][2], gate.tanh())


def test_norms_and_biases_of_the_adapter_are_used() -> None:
    tensors, (_, state) = adapter_tensors("BIAS-TINY"), build(open_adapter(adapter_path("BIAS-TINY")))
    assert torch.equal(state["norm.weight"], tensors["llama.norm.weight"])
    assert torch.equal(state["layers.2.attention_norm.weight"], tensors["llama.layers.2.attention_norm.weight"])
    assert torch.equal(state["layers.2.feed_forward_norm.weight"], tensors["llama.layers.2.ffn_norm.weight"])
    assert torch.equal(state["layers.2.attention.qkv.bias"][:DIM], tensors["llama.layers.2.attention.wq.bias"][ORDER])
    assert not state["layers.2.attention.qkv.bias"][DIM:].any()
    w1, w3 = (tensors[f"llama.layers.2.feed_forward.{name}.bias"] for name in ("w1", "w3"))
    assert torch.equal(state["layers.2.feed_forward.gate_up.bias"], torch.cat([w1, w3]))


def test_base_norms_are_kept_without_those_of_the_adapter() -> None:
    _, state = build(open_adapter(adapter_path("CAPTION-TINY")))
    assert torch.equal(state["norm.weight"], LLAMA.tensors["norm.weight"].read().float())
    assert not any(tensor.any() for key, tensor in state.items() if key.endswith(".bias"))


def test_llama_tensors_of_a_trainer_checkpoint_override_the_folder(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("tok_embeddings", "layers.1.attention.wk", "layers.1.attention.wv", "output"):
            tensors[f"llama.{name}.weight"] = tensors[f"llama.{name}.weight"] + 1

    adapter = edited(tmp_path, "training-checkpoint-0", change)
    huggingface = open_huggingface(GOLDEN / "LLaMA-HF" / "TINY")
    for llama in (LLAMA, huggingface):  # the checkpoint's q and k rows are in Meta's order for both kinds of folder
        _, state = build_decoder(llama, adapter, vocab_size=512)
        wk = adapter.llama["layers.1.attention.wk.weight"].float()
        assert torch.equal(state["layers.1.attention.qkv.weight"][DIM : 2 * DIM], wk[ORDER])
        assert torch.equal(state["embedding.weight"], adapter.llama["tok_embeddings.weight"].float())
        assert torch.equal(state["head.weight"], adapter.llama["output.weight"].float())


def test_prefix_llma_of_older_trainers(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("llama.")]:
            tensors["llma." + key.removeprefix("llama.")] = tensors.pop(key)

    arguments = Namespace(batch_size=4)
    old = edited(tmp_path, "training-checkpoint-0", rename, epoch=0, args=arguments)
    wanted = build(open_adapter(adapter_path("training-checkpoint-0")))[1]
    state = build(old)[1]
    assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == []


def test_plain_dictionary_of_tensors(tmp_path: Path) -> None:
    torch.save(adapter_tensors("BIAS-TINY"), tmp_path / "plain.pth")
    state, wanted = build(open_adapter(tmp_path / "plain.pth"))[1], build(open_adapter(adapter_path("BIAS-TINY")))[1]
    assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == []


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_tensor_of_an_adapter_has_one_owner(name: str) -> None:
    adapter = open_adapter(adapter_path(name))
    assert len(adapter.llama) + len(adapter.visual) + len(adapter.clip) + 1 == len(adapter_tensors(name))


def test_gates_of_layers_without_adapter_are_optional(tmp_path: Path) -> None:
    adapter = edited(tmp_path, "BIAS-TINY", drop("llama.layers.0.attention.gate"))
    assert build(adapter)[0].num_adapter_layers == 3


def test_lora_rank_is_read_from_the_tensors_and_not_from_the_config(tmp_path: Path) -> None:
    config = {"w_bias": True, "w_lora": True, "lora_rank": 999}
    assert build(edited(tmp_path, "LORA-BIAS-TINY", lambda _: None, config=config))[0].separate_adapter_kv


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
