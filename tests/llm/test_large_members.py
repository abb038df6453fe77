"""Large LLaMAs from Meta's 2, 4, 8 and 16 files: small in width, or as shapes only."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from llama_adapter.app.models.random_model import LLAMA_SIZES, decoder_config
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.adapter import AdapterFile, check_fits
from llama_adapter.llm.weights.build import plan_decoder
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.llm.weights.names import SplitTensor, checked_source, llama_shapes, matrix_shapes
from llama_adapter.runtime.errors import CheckpointError
from tests.llm.toys import build_decoder, refusal

VOCABULARY, LAYERS = 32, 3
# How Meta's files split a tensor: by rows, by columns, or with a copy in each file.
BY_ROWS = (".wq.", ".wk.", ".wv.", ".w1.", ".w3.", "output.")
BY_COLUMNS = (".wo.", ".w2.", "tok_embeddings.")


class Member(NamedTuple):
    """A LLaMA with its real heads, files and norm, but a small width."""

    name: str
    files: int
    heads: int
    dim: int  # two per head
    ffn_dim: int  # by Meta's formula, from `dim` and `multiple_of`
    multiple_of: int
    eps: float
    kv_heads: int = 0  # 0: as many as heads
    has_rows_of_tokens: bool = False  # in its files, the embedding is split by tokens, as in Llama 3

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=VOCABULARY,
            dim=self.dim,
            num_layers=LAYERS,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_dim=self.ffn_dim,
            norm_eps=self.eps,
        )


MEMBERS = (
    Member("13B", 2, 40, 80, 224, 16, 1e-6),
    Member("30B", 4, 52, 104, 288, 32, 1e-6),
    Member("65B", 8, 64, 128, 352, 32, 1e-5),
    Member("Llama 2 70B", 8, 64, 128, 448, 64, 1e-5, kv_heads=8),
    Member("Llama 3.1 405B", 16, 128, 256, 896, 64, 1e-5, kv_heads=8, has_rows_of_tokens=True),
)
ids = [member.name for member in MEMBERS]


def whole(member: Member) -> dict[str, Tensor]:
    """Random tensors under Meta's names."""
    generator = torch.Generator().manual_seed(len(member.name))
    shapes = llama_shapes(member.config)
    return {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}


def parts_of(name: str, tensor: Tensor, num_files: int, *, kv_heads: int = 0, by_rows: bool = False) -> list[Tensor]:
    if kv_heads and num_files > kv_heads and (".wk." in name or ".wv." in name):
        return [part for part in tensor.chunk(kv_heads) for _ in range(num_files // kv_heads)]  # neighbours have copies
    if any(part in name for part in BY_ROWS) or (by_rows and "tok_embeddings" in name):
        return list(tensor.chunk(num_files, dim=0))
    if any(part in name for part in BY_COLUMNS):
        return [part.clone() for part in tensor.chunk(num_files, dim=1)]
    return [tensor] * num_files


def write_meta(folder: Path, member: Member, tensors: dict[str, Tensor], *, num_files: int) -> Path:
    """Write a folder in Meta's form."""
    folder.mkdir()
    params = {"dim": member.dim, "multiple_of": member.multiple_of, "n_heads": member.heads, "n_layers": LAYERS}
    params |= {"n_kv_heads": member.kv_heads} if member.kv_heads else {}
    (folder / "params.json").write_text(json.dumps({**params, "norm_eps": member.eps, "vocab_size": -1}))
    form = {"kv_heads": member.kv_heads, "by_rows": member.has_rows_of_tokens}
    for number in range(num_files):
        shard = {name: parts_of(name, tensor, num_files, **form)[number].clone() for name, tensor in tensors.items()}
        shard["rope.freqs"] = torch.ones(1)
        torch.save(shard, folder / f"consolidated.{number:02d}.pth")
    return folder


def state_of(source: Any) -> dict[str, Tensor]:
    return build_decoder(source, None, vocab_size=VOCABULARY)[1]


@pytest.mark.proves("Meta's 2, 4 and 8 files", "CPU")
@pytest.mark.parametrize("member", MEMBERS, ids=ids)
def test_metas_files_give_one_decoder(member: Member, tmp_path: Path) -> None:
    tensors = whole(member)
    one = open_meta(write_meta(tmp_path / "one", member, tensors, num_files=1))
    several = open_meta(write_meta(tmp_path / "several", member, tensors, num_files=member.files))

    assert len(several.files) == member.files
    assert several.config == member.config
    assert all(torch.equal(several.tensors[name].read(), tensor) for name, tensor in tensors.items())
    wanted = state_of(one)
    state = state_of(several)
    assert [name for name in wanted if not torch.equal(wanted[name], state[name])] == []


def test_a_missing_foreign_or_doubled_file_is_told_where_neighbours_have_copies(tmp_path: Path) -> None:
    member = MEMBERS[-1]
    last = f"consolidated.{member.files - 1:02d}.pth"
    folder = write_meta(tmp_path / "meta", member, whole(member), num_files=member.files)
    content = (folder / last).read_bytes()

    (folder / last).unlink()
    assert f"{member.files - 1} shards instead of {member.files}" in refusal(lambda: open_meta(folder), tmp_path)
    (folder / last).write_bytes((folder / "consolidated.00.pth").read_bytes())
    assert "disagree about" in refusal(lambda: open_meta(folder), tmp_path)
    (folder / last).write_bytes(content)
    (folder / f"consolidated.{member.files:02d}.pth").write_bytes(content)
    assert f"{member.files + 1} shards instead of {member.files}" in refusal(lambda: open_meta(folder), tmp_path)
    (folder / f"consolidated.{member.files:02d}.pth").unlink()
    tensors = torch.load(folder / last, weights_only=True)
    tensors["layers.1.attention.wk.weight"] += 1  # heads that should be copies of their neighbour's
    torch.save(tensors, folder / last)
    assert "disagree about `layers.1.attention.wk.weight`" in refusal(lambda: open_meta(folder), tmp_path)


# At full size, by shapes


def true_source(name: str, *, num_files: int) -> Any:
    config = dataclasses.replace(decoder_config(LLAMA_SIZES[name]), num_adapter_layers=0, num_queries=0)
    tensors = {}
    for key, shape in llama_shapes(config).items():
        parts = parts_of(key, torch.empty(shape, dtype=torch.float16, device="meta"), num_files)
        is_split = any(part in key for part in BY_ROWS + BY_COLUMNS)
        axis = 1 if any(part in key for part in BY_COLUMNS) else 0
        tensors[key] = SplitTensor(tuple(parts) if is_split else (parts[0],), axis)
    return checked_source(Path(name), [], tensors, config=config, stated_in="params.json", meaning="", half_split=False)


def test_true_sizes_are_metas() -> None:
    for size in (LLAMA_SIZES[name] for name in ("7B", "13B", "30B", "65B")):
        assert size.dim == 128 * size.num_heads
        assert size.ffn_dim == -(-(8 * size.dim // 3) // 256) * 256


def test_the_released_chat_adapter_fits_65b_and_nothing_else() -> None:
    """The adapter's published tensor names and shapes, without values."""
    size, source = LLAMA_SIZES["65B"], true_source("65B", num_files=8)
    llama = {}
    for layer in range(size.num_layers):
        for name, (rows, columns) in matrix_shapes(source.config).items():
            llama[f"layers.{layer}.{name}_bias"] = torch.empty(rows, device="meta")
            llama[f"layers.{layer}.{name}_scale"] = torch.empty(columns, device="meta")
        for name in ("attention_norm", "ffn_norm"):
            llama[f"layers.{layer}.{name}.weight"] = torch.empty(size.dim, device="meta")
    adapter = AdapterFile(
        name="chat", queries=torch.zeros(0, size.dim), visual={}, llama=llama, clip={}, declares={}, is_chat=True
    )
    config = plan_decoder(source, adapter, vocab_size=32000, context=2048)

    assert (config.num_adapter_layers, config.num_queries, config.separate_adapter_kv) == (0, 0, False)
    with pytest.raises(CheckpointError, match="width 8192"):
        check_fits(adapter, true_source("30B", num_files=4).config, llama="30B")
