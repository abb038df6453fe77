"""Adapter files and the decoder built from them: nothing is lost, merged equals unmerged, what does not fit is told."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.weights.adapter import AdapterFile, open_adapter
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.runtime.errors import CheckpointError
from tests.llm.toys import build_decoder

GOLDEN = Path(__file__).parents[1] / "golden"
ADAPTERS = ("BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", "training-checkpoint-0")
LLAMA = open_meta(GOLDEN / "LLaMA" / "TINY")
HEADS, DIM, FFN, LAYERS, QUERIES = 4, 64, 192, 4, 10


def adapter_path(name: str) -> Path:
    return GOLDEN / "adapters" / f"{name}.pth"


def tensors_of(name: str) -> dict[str, Tensor]:
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(adapter_path(name), weights_only=True)
    return dict(content["model"])


def edited(tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], object], **entries: object) -> AdapterFile:
    """The adapter with its tensors changed by `edit`, as a file of its own."""
    tensors: dict[str, Any] = tensors_of(name)
    edit(tensors)
    path = tmp_path / "adapter.pth"
    torch.save({"model": tensors, **entries}, path)
    return open_adapter(path)


def build(adapter: AdapterFile | None, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    return build_decoder(LLAMA, adapter, vocab_size=512, **options)


def meta_row(row: int, heads: int = HEADS, dim: int = DIM) -> int:
    """Meta's row for a row of ours: within a head of size d, s * d/2 + i here is 2 i + s there."""
    size = dim // heads
    head, within = divmod(row, size)
    s, i = divmod(within, size // 2)
    return head * size + 2 * i + s


ORDER = torch.tensor([meta_row(row) for row in range(DIM)])


@pytest.mark.parametrize("name", [*ADAPTERS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_adapter_gives_exactly_the_decoders_state(name: str | None, dtype: torch.dtype) -> None:
    adapter = None if name is None else open_adapter(adapter_path(name))
    config, state = build(adapter, context=40, dtype=dtype)
    LlamaAdapterDecoder(config).load_state_dict(state, strict=True)
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert (config.num_adapter_layers, config.num_queries) == ((3, 10) if name else (0, 0))
    assert config.separate_adapter_kv == (name == "LORA-BIAS-TINY")
    assert config.context == 40


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_form_of_llama_gives_the_same_decoder(name: str) -> None:
    adapter = open_adapter(adapter_path(name))
    wanted = build(adapter)
    two_shards = open_meta(GOLDEN / "LLaMA" / "TINY-2SHARD")
    for llama in (two_shards, open_huggingface(GOLDEN / "LLaMA-HF" / "TINY")):
        config, state = build_decoder(llama, adapter, vocab_size=512)
        assert config == wanted[0]
        assert [key for key in state if not torch.equal(state[key], wanted[1][key])] == []


@pytest.mark.parametrize("layer", [0, 2])
def test_merged_lora_equals_the_two_small_products_for_tokens(layer: int) -> None:
    tensors, (_, state) = tensors_of("LORA-BIAS-TINY"), build(open_adapter(adapter_path("LORA-BIAS-TINY")))
    generator = torch.Generator().manual_seed(7)
    x = {DIM: torch.randn(5, DIM, generator=generator), FFN: torch.randn(5, FFN, generator=generator)}

    def unmerged(matrix: str) -> Tensor:
        group, name = matrix.split(".")
        weight = LLAMA.tensors[f"layers.{layer}.{matrix}.weight"].read().float()
        l1, l2 = (tensors[f"llama.layers.{layer}.{group}.lora_{name}_l{i}.weight"].float() for i in (1, 2))
        inputs = x[weight.shape[1]]
        bias = tensors.get(f"llama.layers.{layer}.{matrix}.bias", torch.zeros(weight.shape[0]))
        return inputs @ weight.T + (inputs @ l1.T) @ l2.T + bias

    def merged(module: str) -> Tensor:
        weight, bias = state[f"layers.{layer}.{module}.weight"], state[f"layers.{layer}.{module}.bias"]
        return x[weight.shape[1]] @ weight.T + bias

    q, k, v = (unmerged(f"attention.{name}") for name in ("wq", "wk", "wv"))
    gate_up = torch.cat([unmerged("feed_forward.w1"), unmerged("feed_forward.w3")], dim=1)
    for ours, theirs in (
        (merged("attention.qkv"), torch.cat([q[:, ORDER], k[:, ORDER], v], dim=1)),
        (merged("attention.out"), unmerged("attention.wo")),
        (merged("feed_forward.gate_up"), gate_up),
        (merged("feed_forward.down"), unmerged("feed_forward.w2")),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_the_adapter_keeps_bare_keys_and_values_beside_lora() -> None:
    _, state = build(open_adapter(adapter_path("LORA-BIAS-TINY")))
    for j in range(3):
        wk, wv = (LLAMA.tensors[f"layers.{j + 1}.attention.{name}.weight"].read().float() for name in ("wk", "wv"))
        assert torch.equal(state[f"adapter.kv.{j}.weight"], torch.cat([wk[ORDER], wv]))
        assert not torch.equal(state[f"layers.{j + 1}.attention.qkv.weight"][DIM:], state[f"adapter.kv.{j}.weight"])


@pytest.mark.parametrize("name", ["BIAS-TINY", "LORA-BIAS-TINY"])
def test_gates_are_folded_for_the_last_layers(name: str) -> None:
    tensors, (_, state) = tensors_of(name), build(open_adapter(adapter_path(name)))
    for j in range(3):
        prefix = f"llama.layers.{j + 1}.attention."
        new_gate = float(tensors.get(f"{prefix}new_gate", torch.ones(1)))
        assert torch.equal(state["adapter.gates"][j], tensors[f"{prefix}gate"].float().view(HEADS).tanh() * new_gate)
    assert torch.equal(state["adapter.queries"].view(30, DIM), tensors["adapter_query.weight"])


def test_a_single_query_has_no_new_gate_as_in_the_reference(tmp_path: Path) -> None:
    def keep_one_query(tensors: dict[str, Tensor]) -> None:
        tensors["visual_query.weight"] = tensors["visual_query.weight"][:1]
        tensors["adapter_query.weight"] = tensors["adapter_query.weight"][:3]

    config, state = build(edited(tmp_path, "LORA-BIAS-TINY", keep_one_query))
    gate = tensors_of("LORA-BIAS-TINY")["llama.layers.3.attention.gate"].float().view(HEADS)
    assert config.num_queries == 1
    assert torch.equal(state["adapter.gates"][2], gate.tanh())


def test_new_gate_is_one_where_a_lora_file_lacks_it(tmp_path: Path) -> None:
    without = edited(tmp_path, "LORA-BIAS-TINY", lambda t: [t.pop(key) for key in list(t) if key.endswith("new_gate")])
    gate = tensors_of("LORA-BIAS-TINY")["llama.layers.3.attention.gate"].float().view(HEADS)
    assert torch.equal(build(without)[1]["adapter.gates"][2], gate.tanh())


def test_norms_and_biases_of_the_adapter_take_effect() -> None:
    tensors, (_, state) = tensors_of("BIAS-TINY"), build(open_adapter(adapter_path("BIAS-TINY")))
    assert torch.equal(state["norm.weight"], tensors["llama.norm.weight"])
    assert torch.equal(state["layers.2.attention_norm.weight"], tensors["llama.layers.2.attention_norm.weight"])
    assert torch.equal(state["layers.2.feed_forward_norm.weight"], tensors["llama.layers.2.ffn_norm.weight"])
    assert torch.equal(state["layers.2.attention.qkv.bias"][:DIM], tensors["llama.layers.2.attention.wq.bias"][ORDER])
    assert not state["layers.2.attention.qkv.bias"][DIM:].any()
    w1, w3 = (tensors[f"llama.layers.2.feed_forward.{name}.bias"] for name in ("w1", "w3"))
    assert torch.equal(state["layers.2.feed_forward.gate_up.bias"], torch.cat([w1, w3]))


def test_without_norms_and_biases_the_base_models_stay() -> None:
    _, state = build(open_adapter(adapter_path("CAPTION-TINY")))
    assert torch.equal(state["norm.weight"], LLAMA.tensors["norm.weight"].read().float())
    assert not any(tensor.any() for key, tensor in state.items() if key.endswith(".bias"))


def test_llama_tensors_in_a_trainer_checkpoint_win_over_the_folder(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("tok_embeddings", "layers.1.attention.wk", "layers.1.attention.wv", "output"):
            tensors[f"llama.{name}.weight"] = tensors[f"llama.{name}.weight"] + 1

    adapter = edited(tmp_path, "training-checkpoint-0", change)
    huggingface = open_huggingface(GOLDEN / "LLaMA-HF" / "TINY")
    for llama in (LLAMA, huggingface):  # the checkpoint's q and k rows are in Meta's order whatever the folder's are
        _, state = build_decoder(llama, adapter, vocab_size=512)
        wk = adapter.llama["layers.1.attention.wk.weight"].float()
        assert torch.equal(state["layers.1.attention.qkv.weight"][DIM : 2 * DIM], wk[ORDER])
        assert torch.equal(state["embedding.weight"], adapter.llama["tok_embeddings.weight"].float())
        assert torch.equal(state["head.weight"], adapter.llama["output.weight"].float())


def test_older_trainer_checkpoints_say_llma(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("llama.")]:
            tensors["llma." + key.removeprefix("llama.")] = tensors.pop(key)

    arguments = Namespace(batch_size=4)
    old = edited(tmp_path, "training-checkpoint-0", rename, epoch=0, args=arguments)
    wanted = build(open_adapter(adapter_path("training-checkpoint-0")))[1]
    state = build(old)[1]
    assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == []


def test_a_plain_dictionary_of_the_tensors_is_an_adapter_too(tmp_path: Path) -> None:
    torch.save(tensors_of("BIAS-TINY"), tmp_path / "plain.pth")
    state, wanted = build(open_adapter(tmp_path / "plain.pth"))[1], build(open_adapter(adapter_path("BIAS-TINY")))[1]
    assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == []


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_tensor_of_an_adapter_has_one_owner(name: str) -> None:
    adapter = open_adapter(adapter_path(name))
    assert len(adapter.llama) + len(adapter.visual) + len(adapter.clip) + 1 == len(tensors_of(name))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("BIAS-TINY", "llama.layers.2.attention.gate"),
        ("BIAS-TINY", "llama.layers.0.feed_forward.w2.bias"),
        ("BIAS-TINY", "llama.norm.weight"),
        ("BIAS-TINY", "llama.layers.3.ffn_norm.weight"),
        ("LORA-BIAS-TINY", "llama.layers.1.attention.lora_wk_l2.weight"),
        ("LORA-BIAS-TINY", "llama.layers.1.attention.new_gate"),
        ("CAPTION-TINY", "llama.layers.2.attention.gate"),
        ("training-checkpoint-0", "llama.layers.1.attention.wv.weight"),
        ("training-checkpoint-0", "llama.output.weight"),
    ],
)
def test_a_tensor_missing_from_the_adapter_is_named(tmp_path: Path, name: str, key: str) -> None:
    adapter = edited(tmp_path, name, lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match="lacks 1 tensors .`" + key.removeprefix("llama.").replace(".", r"\.")):
        build(adapter)


def test_the_gate_of_a_layer_without_adapter_may_be_absent(tmp_path: Path) -> None:
    adapter = edited(tmp_path, "BIAS-TINY", lambda tensors: tensors.pop("llama.layers.0.attention.gate"))
    assert build(adapter)[0].num_adapter_layers == 3


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("key", ["llama.layers.1.attention.wk.bias", "llama.layers.1.surprise", "visual_thing.weight"])
def test_an_unknown_tensor_in_the_adapter_is_named(tmp_path: Path, name: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=key.removeprefix("llama.").replace(".", r"\.")):
        build(edited(tmp_path, name, lambda tensors: tensors.update({key: torch.ones(DIM)})))


def test_a_config_that_declares_what_is_not_there_is_told(tmp_path: Path) -> None:
    adapter = edited(tmp_path, "CAPTION-TINY", lambda _: None, config={"w_bias": True, "w_lora": False})
    with pytest.raises(CheckpointError, match=r"lacks 20 tensors .*attention\.wq\.bias"):
        build(adapter)
    adapter = edited(tmp_path, "BIAS-TINY", lambda _: None, config={"w_bias": True, "w_lora": True})
    with pytest.raises(CheckpointError, match=r"lacks 56 tensors .*lora_wq_l1"):
        build(adapter)


def test_a_wrong_rank_in_the_config_is_of_no_importance(tmp_path: Path) -> None:
    config = {"w_bias": True, "w_lora": True, "lora_rank": 999}
    assert build(edited(tmp_path, "LORA-BIAS-TINY", lambda _: None, config=config))[0].separate_adapter_kv


def test_an_adapter_for_another_width_is_told_with_both(tmp_path: Path) -> None:
    adapter = edited(
        tmp_path, "BIAS-TINY", lambda tensors: tensors.update({"adapter_query.weight": torch.ones(30, 5120)})
    )
    with pytest.raises(CheckpointError, match=r"made for a LLaMA of width 5120, and .* has width 64") as caught:
        build(adapter)
    assert "13B" in caught.value.hint


def test_an_adapter_for_another_number_of_layers_is_told_with_both(tmp_path: Path) -> None:
    adapter = edited(
        tmp_path, "CAPTION-TINY", lambda t: t.update({"llama.layers.9.attention.gate": torch.ones(1, 4, 1, 1)})
    )
    with pytest.raises(CheckpointError, match=r"made for a LLaMA of 10 layers, and .* has 4"):
        build(adapter)


def test_a_misshapen_tensor_in_the_adapter_is_told_with_both_shapes(tmp_path: Path) -> None:
    adapter = edited(
        tmp_path, "BIAS-TINY", lambda t: t.update({"llama.layers.1.attention.gate": torch.ones(1, 32, 1, 1)})
    )
    with pytest.raises(CheckpointError, match=r"attention\.gate` has the shape \[1, 32, 1, 1\], where \[1, 4, 1, 1\]"):
        build(adapter)


def test_numbers_in_the_place_of_low_rank_factors_are_told(tmp_path: Path) -> None:
    def flatten(tensors: dict[str, Tensor]) -> None:
        tensors |= {key: torch.zeros(()) for key in tensors if key.endswith("_l1.weight")}

    with pytest.raises(CheckpointError, match=r"_l1\.weight` has the shape \[\]"):
        build(edited(tmp_path, "LORA-BIAS-TINY", flatten))


@pytest.mark.parametrize("key", ["llama.layers.1.attention.wq.bias", "clip_proj.bias", "adapter_query.weight"])
def test_tensors_of_another_kind_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"`{key}` as a tensor of another kind".replace(".", r"\.")):
        edited(tmp_path, "BIAS-TINY", lambda tensors: tensors.update({key: tensors[key].to("meta")}))


def test_queries_that_do_not_divide_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 31 adapter queries, which is no multiple of its 10"):
        edited(tmp_path, "BIAS-TINY", lambda t: t.update({"adapter_query.weight": torch.ones(31, DIM)}))


def test_a_text_only_adapter_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"without `visual_query\.weight`, so it cannot see pictures"):
        edited(tmp_path, "BIAS-TINY", lambda tensors: tensors.pop("visual_query.weight"))


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("LLaMA/TINY/consolidated.00.pth", "is no LLaMA-Adapter file: it is LLaMA weights in Meta's form"),
        ("LLaMA-HF/TINY/model-00001-of-00002.safetensors", "it is a language model in Hugging Face's form"),
        ("CLIP/tiny-vit-torchscript.pt", "is a TorchScript archive, as OpenAI publishes CLIP"),
        ("LLaMA/tokenizer.model", "is cut short, damaged, or no tensor file"),
        ("LLaMA", "is a folder, where a file is wanted"),
        ("absent.pth", "There is no file"),
    ],
)
def test_another_file_in_the_place_of_the_adapter_is_recognised(other: str, kind: str) -> None:
    with pytest.raises(CheckpointError, match=kind):
        open_adapter(GOLDEN / other)
