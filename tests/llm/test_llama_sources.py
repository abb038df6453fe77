"""LLaMA folders as users have them: all forms of one model are one model, and what is wrong with a folder is told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.names import half_split
from llama_adapter.runtime.errors import CheckpointError
from tests.llm.toys import build_decoder

GOLDEN = Path(__file__).parents[1] / "golden"
ONE_SHARD = GOLDEN / "LLaMA" / "TINY"
TWO_SHARDS = GOLDEN / "LLaMA" / "TINY-2SHARD"
HUGGINGFACE = GOLDEN / "LLaMA-HF" / "TINY"
SHARD = "consolidated.00.pth"


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ONE_SHARD, tmp_path / "meta"))


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TWO_SHARDS, tmp_path / "two"))


@pytest.fixture
def huggingface(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HUGGINGFACE, tmp_path / "hf"))


def edit_tensors(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    tensors = torch.load(path, weights_only=True)
    edit(tensors)
    torch.save(tensors, path)


def edit_json(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def is_mapped(tensor: Tensor, path: Path) -> bool:
    """Whether the tensor's memory is a mapping of that file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
        if line.endswith(str(path)) and first <= tensor.data_ptr() < last:
            return True
    return False


def state_of(source: Any) -> dict[str, Tensor]:
    return build_decoder(source, None, vocab_size=512)[1]


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_two_shards_are_the_same_model_as_one() -> None:
    assert_equal(state_of(open_meta(TWO_SHARDS)), state_of(open_meta(ONE_SHARD)))


def test_huggingface_folder_is_the_same_model_as_metas() -> None:
    assert_equal(state_of(open_huggingface(HUGGINGFACE)), state_of(open_meta(ONE_SHARD)))


def test_half_split_puts_meta_row_2i_plus_s_at_s_half_plus_i() -> None:
    heads, size = 3, 8
    rows = torch.arange(heads * size)
    reordered = half_split(rows, heads)
    for head in range(heads):
        for i in range(size // 2):
            for s in range(2):
                assert reordered[head * size + s * size // 2 + i] == head * size + 2 * i + s
    assert torch.equal(half_split(rows[:, None].expand(-1, 5), heads)[:, 3], reordered)


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
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = {key: f"pytorch_model-0000{1 + index % 2}-of-00002.bin" for index, key in enumerate(tensors)}
        for name in set(names.values()):
            torch.save({key: tensor for key, tensor in tensors.items() if names[key] == name}, folder / name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "bin", "sharded bin"])
def test_every_file_form_of_huggingface_is_the_same_model(tmp_path: Path, kind: str) -> None:
    folder = write_huggingface(tmp_path / "hf", kind=kind, tensors=huggingface_tensors())
    assert_equal(state_of(open_huggingface(folder)), state_of(open_meta(ONE_SHARD)))


def test_rotary_tables_of_old_huggingface_files_are_known(tmp_path: Path) -> None:
    tensors = huggingface_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = write_huggingface(tmp_path / "hf", kind="bin", tensors=tensors)
    assert_equal(state_of(open_huggingface(folder)), state_of(open_meta(ONE_SHARD)))


def test_tied_output_is_the_embedding_and_not_the_same_memory(tmp_path: Path) -> None:
    tensors = {key: tensor.float() for key, tensor in huggingface_tensors().items()}
    del tensors["lm_head.weight"]
    folder = write_huggingface(tmp_path / "hf", kind="safetensors", tensors=tensors, tie_word_embeddings=True)
    state = state_of(open_huggingface(folder))
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    assert state["head.weight"].data_ptr() != state["embedding.weight"].data_ptr()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_tensors_stay_memory_mapped_on_disk() -> None:
    source = open_meta(ONE_SHARD)
    assert is_mapped(source.tensors["layers.0.attention.wq.weight"].read(), ONE_SHARD / SHARD)
    source = open_huggingface(HUGGINGFACE)
    weight = source.tensors["layers.0.attention.wq.weight"].read()
    assert is_mapped(weight, HUGGINGFACE / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    "key", ["layers.1.attention.wk.weight", "norm.weight", "output.weight", "layers.0.ffn_norm.weight"]
)
def test_a_missing_tensor_is_named(meta: Path, huggingface: Path, key: str) -> None:
    edit_tensors(meta / SHARD, lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match="lacks.*`" + key.replace(".", r"\.")) as caught:
        open_meta(meta)
    assert caught.value.hint


def test_a_tensor_missing_from_huggingface_is_named(tmp_path: Path) -> None:
    tensors = huggingface_tensors()
    del tensors["model.layers.2.mlp.up_proj.weight"]
    folder = write_huggingface(tmp_path / "hf", kind="safetensors", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors \(`layers\.2\.feed_forward\.w3\.weight`\)"):
        open_huggingface(folder)


def test_an_unknown_tensor_is_named(meta: Path, tmp_path: Path) -> None:
    edit_tensors(meta / SHARD, lambda tensors: tensors.update({"layers.0.attention.wz.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"do not belong there \(`layers\.0\.attention\.wz\.weight`\)"):
        open_meta(meta)
    tensors = huggingface_tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    with pytest.raises(CheckpointError, match=r"do not belong there \(`model\.layers\.0\.self_attn\.q_proj\.bias`\)"):
        open_huggingface(write_huggingface(tmp_path / "hf", kind="safetensors", tensors=tensors))


def test_at_most_a_dozen_keys_are_listed(meta: Path) -> None:
    edit_tensors(
        meta / SHARD, lambda tensors: [tensors.pop(key) for key in list(tensors) if ".w2." in key or "norm" in key]
    )
    with pytest.raises(CheckpointError, match="and 1 more") as caught:
        open_meta(meta)
    assert str(caught.value).count("`layers.") == 12


def test_a_misshapen_tensor_is_named_with_both_shapes(meta: Path) -> None:
    edit_tensors(meta / SHARD, lambda tensors: tensors.update({"layers.2.attention.wo.weight": torch.ones(64, 60)}))
    with pytest.raises(
        CheckpointError, match=r"`layers\.2\.attention\.wo\.weight` has the shape \[64, 60\], where \[64, 64\]"
    ):
        open_meta(meta)


def test_a_missing_last_shard_is_seen_from_the_shapes(two_shards: Path) -> None:
    (two_shards / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointError, match="has 1 of 2 shards") as caught:
        open_meta(two_shards)
    assert "consolidated.01.pth" in caught.value.hint


def test_a_missing_first_shard_is_seen_from_the_names(two_shards: Path) -> None:
    (two_shards / SHARD).unlink()
    with pytest.raises(CheckpointError, match=r"lacks `consolidated\.00\.pth`"):
        open_meta(two_shards)


def test_a_shard_too_many_is_seen(two_shards: Path) -> None:
    shutil.copy(two_shards / SHARD, two_shards / "consolidated.02.pth")
    with pytest.raises(CheckpointError, match="has 3 shards, where 2 already make the whole model"):
        open_meta(two_shards)


def test_shards_of_two_models_are_seen_from_their_copies(two_shards: Path) -> None:
    edit_tensors(two_shards / "consolidated.01.pth", lambda tensors: tensors["norm.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"disagree about `norm\.weight`"):
        open_meta(two_shards)


def test_a_shard_copied_over_another_is_seen(two_shards: Path) -> None:
    shutil.copy(two_shards / SHARD, two_shards / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"01\.pth` holds the same part of the model as `consolidated\.00\.pth`"):
        open_meta(two_shards)


def test_tensors_of_another_kind_are_refused(meta: Path) -> None:
    edit_tensors(meta / SHARD, lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].long()}))
    with pytest.raises(CheckpointError, match=r"`norm\.weight` as a tensor of another kind"):
        open_meta(meta)


def test_integers_in_huggingface_files_are_refused(tmp_path: Path) -> None:
    tensors = huggingface_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    folder = write_huggingface(tmp_path / "hf", kind="safetensors", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"`model\.norm\.weight` as a tensor of another kind"):
        open_huggingface(folder)


@pytest.mark.parametrize("key", ["layers.0.feed_forward.w1.weight", "output.weight", "layers.0.attention.wq.weight"])
def test_a_number_in_the_place_of_a_matrix_is_told(meta: Path, key: str) -> None:
    edit_tensors(meta / SHARD, lambda tensors: tensors.update({key: torch.zeros(())}))
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        open_meta(meta)


def test_heads_that_do_not_divide_the_width_are_told(meta: Path) -> None:
    edit_json(meta / "params.json", n_heads=3)
    with pytest.raises(CheckpointError, match="are impossible: dim 64 must be num_heads 3 times an even number"):
        state_of(open_meta(meta))


def test_llama_wrapped_by_a_trainer_is_the_same_model(meta: Path) -> None:
    torch.save({"model": torch.load(meta / SHARD, weights_only=True), "epoch": 3}, meta / SHARD)
    assert_equal(state_of(open_meta(meta)), state_of(open_meta(ONE_SHARD)))


def test_a_missing_huggingface_shard_is_named(huggingface: Path) -> None:
    (huggingface / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks `model-00001-of-00002\.safetensors`, named in"):
        open_huggingface(huggingface)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"n_layers": 40}, "speaks of 40 layers, the weights beside it have 4"),
        ({"dim": 5120}, "speaks of width 5120, its weights have width 64"),
        ({"n_kv_heads": 2}, "shares keys among heads"),
        ({"num_experts": 8}, "entries that may change how the model computes and are not supported: `num_experts`"),
        ({"use_scaled_rope": True}, "are not supported: `use_scaled_rope`"),
        ({"n_heads": None}, "no number, or an impossible one, for `n_heads`"),
        ({"n_layers": 2.7, "dim": float("inf")}, "an impossible one, for `dim`, `n_layers`"),
        ({"norm_eps": float("nan")}, "an impossible one, for `norm_eps`"),
        ({"rope_theta": "x"}, "an impossible one, for `rope_theta`"),
        ({"rope_theta": 0}, "an impossible one, for `rope_theta`"),
    ],
)
def test_params_of_another_model_are_refused(meta: Path, entries: dict[str, object], message: str) -> None:
    edit_json(meta / "params.json", **entries)
    with pytest.raises(CheckpointError, match=message):
        open_meta(meta)


def test_harmless_params_are_tolerated(meta: Path) -> None:
    edit_json(meta / "params.json", n_kv_heads=4, ffn_dim_multiplier=1.3, max_seq_len=2048, use_scaled_rope=False)
    edit_json(meta / "params.json", rope_theta=None)
    assert_equal(state_of(open_meta(meta)), state_of(open_meta(ONE_SHARD)))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "mistral"}, "a model of type 'mistral', where 'llama' is wanted"),
        ({"num_key_value_heads": 2}, "shares keys among heads"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scales its rotary embedding"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "scales its rotary embedding"),
        ({"attention_bias": True}, "its config.json sets `attention_bias`"),
        ({"quantization_config": {"bits": 4}}, "its config.json sets `quantization_config`"),
        ({"hidden_act": "gelu"}, "its config.json sets `hidden_act`"),
        ({"rope_theta": 0}, "an impossible one, for `rope_theta`"),
        ({"rope_parameters": "x"}, "rope_parameters that are no table"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "an impossible one, for `num_attention_heads`"),
        ({"num_hidden_layers": 10**9}, "speaks of 1000000000 layers, the weights beside it have 4"),
        ({"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}, "does not fit its config.json"),
    ],
)
def test_huggingface_models_that_compute_differently_are_refused(
    huggingface: Path, entries: dict[str, object], message: str
) -> None:
    edit_json(huggingface / "config.json", **entries)
    with pytest.raises(CheckpointError, match=message):
        open_huggingface(huggingface)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (GOLDEN / "adapters" / "BIAS-TINY.pth", "a LLaMA-Adapter file"),
        (GOLDEN / "CLIP" / "tiny-vit-torchscript.pt", "is a TorchScript archive, as OpenAI publishes CLIP"),
    ],
)
def test_another_file_in_the_place_of_llama_is_recognised(meta: Path, other: Path, kind: str) -> None:
    shutil.copy(other, meta / SHARD)
    with pytest.raises(CheckpointError, match=kind):
        open_meta(meta)


def test_broken_json_is_told_in_a_sentence(meta: Path, huggingface: Path) -> None:
    (meta / "params.json").write_text("{")
    (huggingface / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is no JSON"):
        open_meta(meta)
    with pytest.raises(CheckpointError, match="where a JSON object is wanted"):
        open_huggingface(huggingface)


def test_tokenizer_of_another_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer has 32000 pieces, and the LLaMA in .* has 512 tokens"):
        build_decoder(open_meta(ONE_SHARD), None, vocab_size=32000)
