"""Folders of today's decoders, written by transformers: configuration, tensors and folds equal those of its modules."""

# N heads, G heads of keys and values, H head size

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import llama_adapter.llm.weights.meta
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.rotary import Rotary
from llama_adapter.llm.split import take
from llama_adapter.llm.training.build import build_decoder as build_trainable
from llama_adapter.llm.weights.adapter import AdapterFile, lora_names
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.families import FAMILIES
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.lora import merged_source, open_loras
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.names import LlamaSource, from_huggingface, half_split, matrix_shapes, to_meta_order
from tests.llm.toys import build_decoder, drop, is_mapped, put, refusal

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
SIZES = {"vocab_size": 48, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
# Name of a case -> model_type, heads, heads of keys and values, and other entries. Groups are 1, 3 and 8 heads.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "llama": ("llama", 4, 4, {}),
    "llama 3.1": (
        *("llama", 6, 2),
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 64}},
    ),
    "llama with biases": ("llama", 3, 1, {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "smollm3": (
        "smollm3",
        8,
        1,
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 7, "head_dim": 6},
    ),
    "smollm3 as told": ("smollm3", 4, 4, {"no_rope_layers": [0, 1, 0]}),
    "mistral": ("mistral", 6, 2, {"head_dim": 10, "sliding_window": 5}),
    "ministral": (
        *("ministral", 6, 2),
        {
            "head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": YARN | {"factor": 1.0},  # not the ratio of its contexts
        },
    ),
    "mistral without window": (
        *("mistral", 6, 6),
        {"sliding_window": None, "rope_parameters": YARN, "original_max_position_embeddings": 16},
    ),
    "qwen2": ("qwen2", 8, 1, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "head_dim": 6}),
    "qwen2 tied": (
        "qwen2",
        6,
        2,
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "qwen3": ("qwen3", 3, 1, {"head_dim": 14, "attention_bias": True}),
    "gemma2": ("gemma2", 3, 1, {"head_dim": 10, "query_pre_attn_scalar": 24, "sliding_window": 5}),
    "gemma3": (
        *("gemma3_text", 8, 1),
        {"head_dim": 6, "query_pre_attn_scalar": 9, "num_hidden_layers": 7, "sliding_window": 5},
    ),
    "gemma3 scaled": (
        *("gemma3_text", 3, 3),
        {
            "head_dim": 6,
            "sliding_window": 9,
            "final_logit_softcapping": 9.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3 without windows": (  # such as Rnj-1
        *("gemma3_text", 4, 2),
        {
            "head_dim": 6,
            "query_pre_attn_scalar": 6,
            "layer_types": ["full_attention"] * 3,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "phi3": ("phi3", 4, 4, {"sliding_window": 9}),
    "phi3 in part": (
        *("phi3", 3, 1),
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": LONG,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
        },
    ),
    "olmo2": ("olmo2", 6, 2, {}),
    "olmo3": (
        "olmo3",
        6,
        2,
        {"num_hidden_layers": 5, "sliding_window": 7, "eos_token_id": 2, "rope_scaling": {**YARN}},
    ),
    "granite": (
        *("granite", 3, 1),
        {
            "attention_bias": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
        },
    ),
}


def made(name: str, **changes: Any) -> Any:
    """A model of transformers with random weights, also in norms and biases; `changes` are entries of its config."""
    kind, heads, kv_heads, options = CASES[name]
    given = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "pad_token_id": 0, **options, **changes}
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **given})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for part, parameter in model.named_parameters():
        if "norm" in part:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        else:
            # Small embeddings, because otherwise the head would repeat the last token where both are tied.
            parameter.normal_(std=0.05 if "embed" in part else 0.3)
    return model


def saved(name: str, folder: Path) -> tuple[Any, Path]:
    model = made(name)
    model.save_pretrained(folder)
    return model, folder


def expected(name: str, model: Any) -> dict[str, Tensor]:
    """The tensors of transformers' modules under our names, with what their forward passes do beside them.

    That the names mean the same is shown by the logits in test_families.py.
    """
    kind, config = CASES[name][0], model.config
    norms = FAMILIES[kind].switches.get("norms", "before")
    named = ((from_huggingface(key, norms=norms), tensor) for key, tensor in model.state_dict().items())
    found = {own: tensor for own, tensor in named if own is not None}
    # Gemma's factor is `LlamaSource.embedding_scale`.
    found["tok_embeddings.weight"] = found["tok_embeddings.weight"] * getattr(config, "embedding_multiplier", 1.0)
    for layer, block in enumerate(model.model.layers):
        if kind == "phi3":
            attention = block.self_attn
            size, kv_heads = attention.head_dim, config.num_key_value_heads
            rows = [config.num_attention_heads * size, kv_heads * size, kv_heads * size]
            pieces = [*attention.qkv_proj.weight.split(rows), *block.mlp.gate_up_proj.weight.chunk(2)]
            fused = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
            found |= {f"layers.{layer}.{one}.weight": piece for one, piece in zip(fused, pieces, strict=True)}
    size = model.model.layers[0].self_attn.head_dim
    factors: dict[str, float] = {}
    if kind == "granite":
        factors = dict.fromkeys(("attention.wo", "feed_forward.w2"), config.residual_multiplier)
        factors |= {"attention.wq": config.attention_multiplier * math.sqrt(size), "output": 1 / config.logits_scaling}
    if "gemma" in kind:
        found = {key: tensor + 1 if "norm" in key else tensor for key, tensor in found.items()}
        where = "attention.wq" if kind == "gemma2" else "attention.q_norm"
        factors = {where: math.sqrt(size / config.query_pre_attn_scalar)}
    for part, factor in factors.items():
        found |= {key: tensor * factor for key, tensor in found.items() if f".{part}." in f".{key}"}
    return found


def assert_close(source: LlamaSource, wanted: Mapping[str, Tensor]) -> None:
    assert source.tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(source.tensors[key].read(), tensor.float(), rtol=1e-6, atol=0, msg=key)


def assert_same(source: LlamaSource, wanted: LlamaSource) -> None:
    assert source.config == wanted.config
    assert_close(source, {key: tensor.read() for key, tensor in wanted.tensors.items()})


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_settings_are_those_of_transformers_modules(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path)
    source, theirs = open_huggingface(folder), model.config
    config = dataclasses.replace(source.config, context=30)

    wanted = expected(name, model)
    if name == "phi3 in part":  # its rows have another order, see the logits
        moved = [key for key in wanted if ".wq." in key or ".wk." in key]
        assert all(sorted(source.tensors[key].read().flatten()) == sorted(wanted[key].flatten()) for key in moved)
        source = dataclasses.replace(source, tensors={k: v for k, v in source.tensors.items() if k not in moved})
        wanted = {key: tensor for key, tensor in wanted.items() if key not in moved}
    assert_close(source, wanted)

    attention = model.model.layers[0].self_attn
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert (config.head_dim, config.norm_eps) == (attention.head_dim, theirs.rms_norm_eps)
    assert config.activation == ("gelu_tanh" if "gemma" in name else "silu")
    assert config.logit_cap == (getattr(theirs, "final_logit_softcapping", None) or 0)
    assert config.score_cap == (50 if name == "gemma2" else 0)
    rotary = model.model.rotary_emb
    for layer, block in enumerate(model.model.layers):
        kind = getattr(theirs, "layer_types", ["full_attention"] * config.num_layers)[layer]
        slides = theirs.sliding_window if theirs.model_type in ("mistral", "phi3") or kind != "full_attention" else 0
        assert config.window_of(layer) == (slides or 0)
        own = config.rotary_of(layer)
        if own is None:
            assert not block.self_attn.use_rope
            continue
        assert getattr(block.self_attn, "use_rope", True)
        per_kind = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
        angles, factors = own.frequencies(config.head_dim, context=config.context)
        frequencies = getattr(rotary, f"{per_kind}inv_freq").numpy()
        np.testing.assert_allclose(angles[: len(frequencies)], frequencies, rtol=1e-6)
        np.testing.assert_allclose(factors[0], getattr(rotary, f"{per_kind}attention_scaling"), rtol=1e-6)
        assert not angles[len(frequencies) :].any()


def as_old(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries as transformers 4 spelled them."""
    renamed = (
        {"rope_parameters", "dtype"}
        if entries["model_type"] == "ministral"
        else {"rope_parameters", "layer_types", "dtype"}
    )
    new = {key: value for key, value in entries.items() if key not in renamed}
    rope = entries["rope_parameters"]
    if "full_attention" in rope:
        if entries["model_type"] == "gemma3_text":
            every = 6 if "sliding_attention" in entries["layer_types"] else 1
            new |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"], "sliding_window_pattern": every}
        rope = rope["full_attention"]
    new |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        new["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":
        scaling = {key: value for key, value in rope.items() if key != "rope_type" and key not in new}
        new["rope_scaling"] = scaling | {"type": "su" if rope["rope_type"] == "longrope" else rope["rope_type"]}
    return new


@pytest.mark.parametrize("name", CASES)
def test_all_spellings_and_the_part_of_a_larger_model_are_one_model(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path)
    path, wanted = folder / "config.json", open_huggingface(folder)
    entries, tensors = json.loads(path.read_text()), load_file(folder / "model.safetensors")
    path.write_text(json.dumps(as_old(entries)))
    bare = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}  # as models without a head are saved
    save_file(bare, folder / "model.safetensors")
    assert_same(open_huggingface(folder), wanted)

    default = type(model.config)().to_dict()  # parts leave out what equals the class's defaults
    part = {key: value for key, value in entries.items() if key == "model_type" or value != default.get(key, default)}
    path.write_text(json.dumps({"model_type": "a larger one", "text_config": part, "hidden_size": 7}))
    renamed = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in tensors.items()}
    save_file(renamed | {"model.vision_tower.bias": torch.ones(3)}, folder / "model.safetensors")
    assert_same(open_huggingface(folder), wanted)


# Flat `rope_parameters`, and the rotary embeddings of layers that see everything and of those with a window: of OLMo 3
# as transformers 5.0 to 5.12 has them, of Gemma 3 as 5.24.
FLAT: tuple[tuple[str, dict[str, Any], tuple[Rotary, Rotary]], ...] = (
    ("olmo3", {"rope_type": "default", "rope_theta": 1e4}, (Rotary(theta=1e4), Rotary(theta=1e4))),
    (
        "olmo3",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 3e5},
        (Rotary(theta=3e5, scaling="yarn", factor=4.0, original_context=32, longest_context=2048), Rotary(theta=3e5)),
    ),
    ("gemma3", {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5}, (Rotary(theta=1e6), Rotary(theta=1e4))),
)


@pytest.mark.parametrize(("name", "values", "rotaries"), FLAT)
def test_flat_rope_parameters_are_read_as_transformers_reads_them(
    name: str, values: dict[str, Any], rotaries: tuple[Rotary, Rotary], tmp_path: Path
) -> None:
    path = saved(name, tmp_path)[1] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": values}))
    config = open_huggingface(tmp_path).config
    assert [config.rotary_of(layer) for layer in (3 if name == "olmo3" else 5, 0)] == [*rotaries]


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "internlm2"])
def test_defaults_are_those_of_transformers_classes(kind: str) -> None:
    found = transformers.CONFIG_MAPPING[kind]
    every = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}.get(kind)
    defaults = {one.name: one.default for one in dataclasses.fields(found)} | {"sliding_window_pattern": every}
    family = FAMILIES[kind]
    assert {name: defaults.get(name) or () for name in family.defaults} == {
        name: value or () for name, value in family.defaults.items()
    }
    theta = found.default_theta
    assert ({"global": family.theta, "local": family.local_theta} if family.local_theta else family.theta) == theta


def test_internlm2_is_a_llama_with_other_names(tmp_path: Path) -> None:
    _, folder = saved("llama 3.1", tmp_path)
    wanted = open_huggingface(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for key, tensor in tensors.items():
        new = (
            key.replace("embed_tokens", "tok_embeddings")
            .replace("lm_head", "output")
            .replace("self_attn.o", "attention.wo")
        )
        for theirs, own in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            new = new.replace(f"mlp.{theirs}_proj", f"feed_forward.{own}")
        new = new.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "ffn_norm")
        renamed[new.replace("wo_proj", "wo")] = tensor
    for layer in range(3):
        before = f"model.layers.{layer}.self_attn"
        q, k, v = (renamed.pop(f"{before}.{part}_proj.weight").view(2, -1, 4, 24) for part in "qkv")
        renamed[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, 24)
    save_file(renamed, folder / "model.safetensors")
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(as_old(entries) | {"model_type": "internlm2", "bias": False}))

    source = open_huggingface(folder)
    assert_same(source, wanted)
    assert [len(source.tensors[f"layers.0.attention.{part}.weight"].parts) for part in ("wq", "wk", "wv")] == [2, 2, 2]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
@pytest.mark.parametrize("name", ["llama 3.1", "qwen2", "qwen3", "phi3"])
def test_tensors_without_folds_are_views_of_the_file(name: str, tmp_path: Path) -> None:
    _, folder = saved(name, tmp_path)
    for tensor in open_huggingface(folder).tensors.values():
        assert tensor.change is None
        assert is_mapped(tensor.read(), folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_an_embedding_is_scaled_in_the_numbers_of_the_computation(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    made(name).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wanted = theirs.model.embed_tokens(torch.arange(SIZES["vocab_size"]))
    read = build_decoder(open_huggingface(tmp_path), None, vocab_size=SIZES["vocab_size"], dtype=dtype)[1]
    assert wanted.dtype == dtype
    assert torch.equal(read["embedding.weight"], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_scales_the_embedding_in_the_numbers_of_the_computation(dtype: torch.dtype, tmp_path: Path) -> None:
    made("gemma3").to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    source, visual = open_huggingface(tmp_path), {"visual_query.weight": torch.zeros(2, 4)}
    gates = {f"layers.{layer}.attention.gate": torch.ones(1, 8, 1, 1) for layer in range(source.config.num_layers)}
    queries = torch.zeros(2 * source.config.num_layers, source.config.dim)
    adapter = AdapterFile(name="adapter", queries=queries, visual=visual, llama=gates, clip={}, declares={})
    trainable = build_trainable(
        plan_decoder(source, adapter, vocab_size=SIZES["vocab_size"]),
        source=source,
        adapter=adapter,
        trained=("gates",),
        lora_rank=0,
        dtype=dtype,
        device="cpu",
        seed=0,
    )
    wanted = theirs.model.embed_tokens(torch.arange(SIZES["vocab_size"]))
    assert torch.equal(trainable.decoder.embedding.weight, wanted)


def test_rows_beyond_the_tokenizer_are_left_out_and_missing_ones_refused(tmp_path: Path) -> None:
    _, folder = saved("gemma2", tmp_path)
    source = open_huggingface(folder)
    whole, narrow = (build_decoder(source, None, vocab_size=size) for size in (48, 41))
    assert narrow[0].vocab_size == 41
    for name, tensor in whole[1].items():
        rows = tensor[:41] if name in ("embedding.weight", "head.weight") else tensor
        assert torch.equal(narrow[1][name], rows)
    assert "49 pieces" in refusal(lambda: plan_decoder(source, None, vocab_size=49), tmp_path)


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("llama with biases", 3), ("mistral", 2), ("mistral", 6), ("qwen2", 2), ("granite", 3)]
)
def test_a_rank_reads_its_part(name: str, num_ranks: int, tmp_path: Path) -> None:
    _, folder = saved(name, tmp_path)
    source = open_huggingface(folder)
    config = plan_decoder(source, None, vocab_size=47)
    given = {"source": source, "adapter": None, "dtype": torch.float32}
    whole = dict(decoder_tensors(config, **given))
    LlamaAdapterDecoder(config).load_state_dict(whole, strict=True)
    for rank in range(num_ranks):
        share = config.share(rank, num_ranks)
        for key, tensor in decoder_tensors(config, share=share, **given):
            assert torch.equal(tensor, take(key, whole[key], whole=config, share=share)), key


def test_an_adapter_has_groups_and_its_biases_replace_those_of_the_base(tmp_path: Path) -> None:
    _, folder = saved("qwen2", tmp_path)
    source = open_huggingface(folder)
    shapes, layers = matrix_shapes(source.config), range(SIZES["num_hidden_layers"])
    llama = {f"layers.{layer}.attention.gate": torch.ones(1, 8, 1, 1) for layer in layers}
    for layer in layers:
        for name, (rows, columns) in shapes.items():
            l1, l2 = lora_names(f"layers.{layer}.{name}")
            llama |= {l1: torch.randn(2, columns), l2: torch.randn(rows, 2)}
            if name not in ("attention.wk", "attention.wv"):
                llama[f"layers.{layer}.{name}.bias"] = torch.randn(rows)
    visual = {"visual_query.weight": torch.zeros(2, 4)}
    adapter = AdapterFile(name="adapter", queries=torch.zeros(4, 24), visual=visual, llama=llama, clip={}, declares={})
    config, state = build_decoder(source, adapter, vocab_size=48)

    q_rows, kv_rows = 8 * 6, 6
    base = {part: source.tensors[f"layers.2.attention.{part}.weight"].read() for part in ("wq", "wk", "wv")}
    update = {part: llama[l2] @ llama[l1] for part in base for l1, l2 in [lora_names(f"layers.2.attention.{part}")]}
    rows = [
        base["wq"] + half_split(update["wq"], 8),
        base["wk"] + half_split(update["wk"], 1),
        base["wv"] + update["wv"],
    ]
    torch.testing.assert_close(state["layers.2.attention.qkv.weight"], torch.cat(rows))
    assert torch.equal(state["adapter.kv.1.weight"], torch.cat([base["wk"], base["wv"]]))
    assert state["adapter.kv.1.weight"].shape == (2 * kv_rows, 24)
    bias = state["layers.2.attention.qkv.bias"]
    assert torch.equal(bias[:q_rows], half_split(llama["layers.2.attention.wq.bias"], 8))
    own = [source.tensors[f"layers.2.attention.{part}.bias"].read() for part in ("wk", "wv")]
    assert torch.equal(bias[q_rows:], torch.cat(own))
    assert torch.equal(state["layers.2.feed_forward.down.bias"], llama["layers.2.feed_forward.w2.bias"])
    LlamaAdapterDecoder(config).load_state_dict(state, strict=True)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3", "granite", "olmo2"])
def test_a_lora_of_peft_is_merged_before_the_folds(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / "base")
    norm = "pre_feedforward_layernorm" if "gemma" in name else "post_attention_layernorm"
    targets = ["q_proj", "k_proj", "o_proj", "down_proj", "embed_tokens"]
    lora = LoraConfig(r=2, target_modules=targets, modules_to_save=[norm], init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "modules_to_save" in key:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "lora")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    source, wanted = open_huggingface(folder), open_huggingface(tmp_path / "merged")

    merged = merged_source(source, open_loras([str(tmp_path / "lora")], source.config))
    for key, tensor in wanted.tensors.items():
        if key == "output.weight" and model.config.tie_word_embeddings:  # only merging ties them again
            tensor = source.tensors[key]
        torch.testing.assert_close(merged.tensors[key].read(), tensor.read(), rtol=1e-5, atol=1e-5, check_dtype=False)
    assert bool(source.merged) == (name in ("gemma2", "gemma3", "granite"))


@pytest.mark.parametrize(("width_of_8b", "factor"), [(64, 32.0), (24, 8.0)])
def test_metas_folder_of_llama_3(
    width_of_8b: int, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_adapter.llm.weights.meta, "_WIDTH_OF_8B", width_of_8b)
    _, folder = saved("llama 3.1", tmp_path / "hf")
    wanted = open_huggingface(folder)
    tensors = {
        key: to_meta_order(re.sub(r"^layers\.\d+\.|\.weight$", "", key), tensor.read(), wanted.config).contiguous()
        for key, tensor in wanted.tensors.items()
    }
    torch.save(tensors, tmp_path / "consolidated.00.pth")
    params = {"dim": 24, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 5e5}
    params |= {"ffn_dim_multiplier": 1.3, "multiple_of": 8, "use_scaled_rope": True, "vocab_size": 48}
    (tmp_path / "params.json").write_text(json.dumps(params))

    source = open_meta(tmp_path)
    scaled = Rotary(theta=5e5, scaling="llama3", factor=factor, original_context=8192)
    assert dataclasses.replace(source.config, rotaries=()) == dataclasses.replace(wanted.config, rotaries=())
    assert source.config.rotaries == (scaled,)
    states = [build_decoder(one, None, vocab_size=48)[1] for one in (source, wanted)]
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []


EDITS: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "no bias": (
        "qwen2",
        drop("model.layers.1.self_attn.k_proj.bias"),
        "lacks 1 tensors (`layers.1.attention.wk.bias`)",
    ),
    "no norm": (
        "gemma3",
        drop("model.layers.2.self_attn.q_norm.weight"),
        "lacks 1 tensors (`layers.2.attention.q_norm",
    ),
    "a norm of another family": (
        *("olmo2", put("model.layers.0.input_layernorm.weight", torch.ones(24))),
        "has 1 tensors that do not belong there (`model.layers.0.input_layernorm.weight`)",
    ),
    "a fused tensor of other heads": (
        *("phi3", put("model.layers.0.self_attn.qkv_proj.weight", torch.ones(70, 24))),
        "`model.layers.0.self_attn.qkv_proj.weight` has the shape [70, 24], where [72, 24] is wanted",
    ),
    "a number as fused tensor": (
        *("phi3", put("model.layers.0.mlp.gate_up_proj.weight", torch.ones(()))),
        "has the shape [], where [40] is wanted",
    ),
    "a bias of another size": (
        *("llama with biases", put("model.layers.0.mlp.up_proj.bias", torch.ones(24))),
        "`layers.0.feed_forward.w3.bias` has the shape [24], where [20] is wanted",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_damaged_folders_are_refused(edit: str, tmp_path: Path) -> None:
    name, change, told = EDITS[edit]
    _, folder = saved(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert told in refusal(lambda: open_huggingface(folder), tmp_path)
