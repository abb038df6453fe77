"""LLaMA 13B, 30B and 65B from Meta's 2, 4 and 8 files and from Hugging Face's: small in width, or as shapes only."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llama_adapter.app.models.random_model import LLAMA_SIZES
from llama_adapter.llm.weights.adapter import AdapterFile, check_fits
from llama_adapter.llm.weights.build import plan_decoder
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.names import MATRICES, SplitTensor, checked_source, half_split, llama_shapes
from llama_adapter.runtime.errors import CheckpointError
from tests.llm.toys import build_decoder, refusal

VOCABULARY, LAYERS = 32, 3
# How Meta's files split a tensor: by rows, by columns, or with a copy in each file.
BY_ROWS = (".wq.", ".wk.", ".wv.", ".w1.", ".w3.", "output.")
BY_COLUMNS = (".wo.", ".w2.", "tok_embeddings.")
HUGGINGFACE = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class Member(NamedTuple):
    """A LLaMA with its real heads, files and norm, but a small width."""

    name: str
    files: int
    heads: int
    dim: int  # two per head
    ffn_dim: int  # by Meta's formula, from `dim` and `multiple_of`
    multiple_of: int
    eps: float


MEMBERS = (
    Member("13B", 2, 40, 80, 224, 16, 1e-6),
    Member("30B", 4, 52, 104, 288, 32, 1e-6),
    Member("65B", 8, 64, 128, 352, 32, 1e-5),
)
ids = [member.name for member in MEMBERS]


def whole(member: Member) -> dict[str, Tensor]:
    """Random tensors under Meta's names."""
    generator = torch.Generator().manual_seed(len(member.name))
    shapes = llama_shapes(vocab_size=VOCABULARY, dim=member.dim, num_layers=LAYERS, ffn_dim=member.ffn_dim)
    return {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}


def parts_of(name: str, tensor: Tensor, num_files: int) -> list[Tensor]:
    if any(part in name for part in BY_ROWS):
        return list(tensor.chunk(num_files, dim=0))
    if any(part in name for part in BY_COLUMNS):
        return [part.clone() for part in tensor.chunk(num_files, dim=1)]
    return [tensor] * num_files


def write_meta(folder: Path, member: Member, tensors: dict[str, Tensor], *, num_files: int) -> Path:
    """Write a folder in Meta's form."""
    folder.mkdir()
    params = {"dim": member.dim, "multiple_of": member.multiple_of, "n_heads": member.heads, "n_layers": LAYERS}
    (folder / "params.json").write_text(json.dumps({**params, "norm_eps": member.eps, "vocab_size": -1}))
    for number in range(num_files):
        shard = {name: parts_of(name, tensor, num_files)[number].clone() for name, tensor in tensors.items()}
        shard["rope.freqs"] = torch.ones(1)
        torch.save(shard, folder / f"consolidated.{number:02d}.pth")
    return folder


def write_huggingface(folder: Path, member: Member, tensors: dict[str, Tensor], *, num_files: int) -> Path:
    """Write a folder in Hugging Face's form: an index over several safetensors files."""
    folder.mkdir()
    sizes = {"hidden_size": member.dim, "intermediate_size": member.ffn_dim, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": member.heads, "num_key_value_heads": member.heads, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "rms_norm_eps": member.eps, **sizes, **heads})
    )
    files: dict[str, dict[str, Tensor]] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        layer, _, rest = name.removesuffix(".weight").partition(".") if name.startswith("layers.") else ("", "", "")
        number, _, module = rest.partition(".")
        key = f"model.layers.{number}.{HUGGINGFACE[module]}" if layer else HUGGINGFACE[name.removesuffix(".weight")]
        rows = half_split(tensor, member.heads) if name.endswith(("wq.weight", "wk.weight")) else tensor
        file = f"model-{1 + index % num_files:05d}-of-{num_files:05d}.safetensors"
        files.setdefault(file, {})[f"{key}.weight"] = rows.contiguous()
    for file, content in files.items():
        save_file(content, folder / file)
    weight_map = {key: file for file, content in files.items() for key in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def state_of(source: Any) -> dict[str, Tensor]:
    return build_decoder(source, None, vocab_size=VOCABULARY)[1]


@pytest.mark.proves("Meta's 2, 4 and 8 files", "CPU")
@pytest.mark.parametrize("member", MEMBERS, ids=ids)
def test_metas_files_and_hugging_faces_index_give_one_decoder(member: Member, tmp_path: Path) -> None:
    tensors = whole(member)
    one = open_meta(write_meta(tmp_path / "one", member, tensors, num_files=1))
    several = open_meta(write_meta(tmp_path / "several", member, tensors, num_files=member.files))
    huggingface = open_huggingface(write_huggingface(tmp_path / "hf", member, tensors, num_files=3))

    assert len(several.files) == member.files
    assert (several.num_heads, several.ffn_dim, several.norm_eps) == (member.heads, member.ffn_dim, member.eps)
    assert all(torch.equal(several.tensors[name].read(), tensor) for name, tensor in tensors.items())
    wanted = state_of(one)
    for source in (several, huggingface):
        state = state_of(source)
        assert [name for name in wanted if not torch.equal(wanted[name], state[name])] == []


@pytest.mark.parametrize("member", MEMBERS, ids=ids)
def test_a_missing_foreign_or_doubled_file_is_told(member: Member, tmp_path: Path) -> None:
    last = f"consolidated.{member.files - 1:02d}.pth"
    folder = write_meta(tmp_path / "meta", member, whole(member), num_files=member.files)
    content = (folder / last).read_bytes()

    (folder / last).unlink()
    assert f"{member.files - 1} of {member.files} shards" in refusal(lambda: open_meta(folder), tmp_path)
    (folder / last).write_bytes((folder / "consolidated.00.pth").read_bytes())
    assert "the same part of the model" in refusal(lambda: open_meta(folder), tmp_path)
    (folder / last).write_bytes(content)
    (folder / f"consolidated.{member.files:02d}.pth").write_bytes(content)
    assert f"the model has {member.files}" in refusal(lambda: open_meta(folder), tmp_path)


def test_llama_2_70b_is_refused_for_its_shared_keys(tmp_path: Path) -> None:
    params = {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8}
    (tmp_path / "params.json").write_text(json.dumps({**params, "n_layers": 80, "norm_eps": 1e-5, "vocab_size": -1}))

    told = refusal(lambda: open_meta(tmp_path), tmp_path)
    assert "shares keys among heads (n_kv_heads 8, n_heads 64)" in told
    assert "LLaMA-2 70B and LLaMA 3 are not" in told


# At full size, by shapes


def true_source(name: str, *, num_files: int) -> Any:
    size = LLAMA_SIZES[name]
    sizes = {"vocab_size": 32000, "dim": size.dim, "num_layers": size.num_layers, "ffn_dim": size.ffn_dim}
    tensors = {}
    for key, shape in llama_shapes(**sizes).items():
        parts = parts_of(key, torch.empty(shape, dtype=torch.float16, device="meta"), num_files)
        is_split = any(part in key for part in BY_ROWS + BY_COLUMNS)
        axis = 1 if any(part in key for part in BY_COLUMNS) else 0
        tensors[key] = SplitTensor(tuple(parts) if is_split else (parts[0],), axis)
    settings = {"num_heads": size.num_heads, "norm_eps": 1e-5, "rope_theta": 10000.0}
    return checked_source(
        Path(name), [], tensors, sizes=sizes, config="params.json", meaning="", half_split=False, **settings
    )


@pytest.mark.parametrize(("name", "num_files"), [("7B", 1), ("13B", 2), ("30B", 4), ("65B", 8)])
def test_true_sizes_are_whole_heads_in_each_file(name: str, num_files: int) -> None:
    source, size = true_source(name, num_files=num_files), LLAMA_SIZES[name]
    config = plan_decoder(source, None, vocab_size=32000)

    assert (config.dim, config.num_layers, config.num_heads, config.ffn_dim) == tuple(
        getattr(size, field) for field in ("dim", "num_layers", "num_heads", "ffn_dim")
    )
    assert config.head_dim == 128
    assert size.ffn_dim == -(-(8 * size.dim // 3) // 256) * 256  # Meta's formula
    rows = source.tensors["layers.0.attention.wq.weight"].parts[0].shape[0]
    assert rows * num_files == size.dim
    assert rows % config.head_dim == 0
    assert {len(source.tensors[f"layers.0.{matrix}.weight"].parts) for matrix in MATRICES} == {num_files}


def test_the_released_chat_adapter_fits_65b_and_nothing_else() -> None:
    """The adapter's published tensor names and shapes, without values."""
    size = LLAMA_SIZES["65B"]
    sides = {"D": size.dim, "F": size.ffn_dim}
    llama = {}
    for layer in range(size.num_layers):
        for name, (rows, columns) in MATRICES.items():
            llama[f"layers.{layer}.{name}_bias"] = torch.empty(sides[rows], device="meta")
            llama[f"layers.{layer}.{name}_scale"] = torch.empty(sides[columns], device="meta")
        for name in ("attention_norm", "ffn_norm"):
            llama[f"layers.{layer}.{name}.weight"] = torch.empty(size.dim, device="meta")
    adapter = AdapterFile(
        name="chat", queries=torch.zeros(0, size.dim), visual={}, llama=llama, clip={}, declares={}, is_chat=True
    )
    config = plan_decoder(true_source("65B", num_files=8), adapter, vocab_size=32000, context=2048)

    assert (config.num_adapter_layers, config.num_queries, config.separate_adapter_kv) == (0, 0, False)
    with pytest.raises(CheckpointError, match="width 8192"):
        check_fits(adapter, true_source("30B", num_files=4))
