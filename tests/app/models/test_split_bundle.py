"""Split bundles: a rank's file holds its part of the whole bundle, and files of different bundles are refused."""

import dataclasses
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.command_line.main import main
from llama_adapter.app.models.bundle import convert, save_bundle, stream_bundle
from llama_adapter.app.models.bundle_manifest import KNOWN_ANSWER, read_manifest
from llama_adapter.app.models.packed_bundle import PackJob, pack_bundle, split_bundle
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.split import share_of, take
from llama_adapter.runtime.errors import CheckpointError, UsageError
from llama_adapter.runtime.schemes import PRECISIONS, Precision
from tests.app.models.bundles import SOURCES, assert_same, edit, edit_manifest
from tests.llm.test_split import Place
from tests.llm.toys import NEEDS_KERNELS


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, split for two ranks. Tests must not change it."""
    return split_bundle(None, tmp_path_factory.mktemp("split") / "two", num_ranks=2)


@pytest.fixture
def own(split: Path, tmp_path: Path) -> Path:
    """A copy of `split` for a single test."""
    return shutil.copytree(split, tmp_path / "copy")


def part(bundle: Path, rank: int, size: int) -> dict[str, Tensor]:
    return dict(stream_bundle(bundle, ranks=Place(rank, size))[1])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_file_holds_what_its_rank_takes_of_the_whole(
    precision: Precision, size: int, embedded: Callable[[Precision], Path], tmp_path: Path
) -> None:
    source, target = embedded(precision), tmp_path / "split"
    split_bundle(source, target, num_ranks=size)
    for rank in range(size):
        assert_same(part(target, rank, size), part(source, rank, size))
    assert (target / KNOWN_ANSWER).read_bytes() == (source / KNOWN_ANSWER).read_bytes()
    manifest = read_manifest(target)
    assert (manifest["precision"], manifest["num_ranks"]) == (precision, size)
    assert manifest["origin"]["digest"] == read_manifest(embedded_model())["digest"]


@pytest.mark.parametrize("wanted", PRECISIONS)
def test_a_rank_takes_its_part_of_a_tensor_when_its_turn_comes(
    wanted: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking a part of matrices that are stored together copies it; all copies at once would be most of a share."""
    taken: list[str] = []

    def recorded(name: str, tensor: Tensor, **options: Any) -> Tensor:
        taken.append(name)
        return take(name, tensor, **options)

    monkeypatch.setattr("llama_adapter.app.models.bundle.take", recorded)
    _, tensors = stream_bundle(embedded_model(), precision=wanted, ranks=Place(1, 2))
    num_given = len({name.removesuffix("_scale") for name, _ in islice(tensors, 10)})

    assert len(taken) == num_given


def test_groups_of_weights_and_heads_are_not_torn_apart(tmp_path: Path) -> None:
    """A head of the tiny model is 16 inputs of the next layer, and a group is 32."""
    job = QuantiseJob(model=str(convert(SOURCES, tmp_path / "whole")), out=str(tmp_path / "int4"), precision="int4")
    split_bundle(quantise_bundle(job), tmp_path / "two", num_ranks=2)
    with pytest.raises(CheckpointError, match="groups are larger"):
        split_bundle(job.out, tmp_path / "four", num_ranks=4)
    with pytest.raises(UsageError, match="heads, so"):
        split_bundle(None, tmp_path / "many", num_ranks=1000)
    assert {place.name for place in tmp_path.iterdir()} == {"whole", "int4", "two"}


@NEEDS_KERNELS
def test_packed_weights_are_unpacked(split: Path, tmp_path: Path) -> None:
    packed = pack_bundle(PackJob(out=str(tmp_path / "packed"), dtype="float32"))
    made = split_bundle(packed, tmp_path / "split", num_ranks=2)
    assert_same(part(made, 1, 2), {name: tensor.float() for name, tensor in part(split, 1, 2).items()})


def test_checkpoints_are_split_as_their_bundle_is(tmp_path: Path) -> None:
    direct = convert(SOURCES, tmp_path / "direct", num_ranks=2)
    twice = split_bundle(convert(SOURCES, tmp_path / "whole"), tmp_path / "twice", num_ranks=2)
    for rank in range(2):
        name = f"llm-rank-{rank}-of-2.safetensors"
        assert (direct / name).read_bytes() == (twice / name).read_bytes()
    assert not (direct / "llm.safetensors").exists()
    assert_same(part(direct, 1, 2), part(twice, 1, 2))


@pytest.mark.parametrize(("size", "words"), [(1, "split for 2 ranks, and this run has 1"), (4, "this run has 4")])
def test_another_number_of_ranks_is_refused(split: Path, size: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as raised:
        stream_bundle(split, ranks=Place(0, size))
    assert "--tensor-parallel 2" in raised.value.hint


def test_a_machine_needs_the_files_of_its_own_ranks(split: Path, own: Path) -> None:
    (own / "llm-rank-0-of-2.safetensors").unlink()
    assert_same(part(own, 1, 2), part(split, 1, 2))
    with pytest.raises(CheckpointError, match=r"lacks `llm-rank-0-of-2\.safetensors`"):
        part(own, 0, 2)


def test_files_that_changed_their_places_are_refused(own: Path) -> None:
    first, second = (own / f"llm-rank-{rank}-of-2.safetensors" for rank in range(2))
    first.rename(own / "other")
    second.rename(first)
    (own / "other").rename(second)
    with pytest.raises(CheckpointError, match=r"holds the part of rank 1 of 2, where rank 0 of 2 is wanted"):
        part(own, 0, 2)
    errors = {finding.what for finding in diagnose(CaptionerSpec(model=own)) if finding.level == "error"}
    assert errors == {first.name, second.name}


def test_a_bundle_that_does_not_tell_its_blocks_was_divided_in_blocks_of_64(
    embedded: Callable[[Precision], Path], tmp_path: Path
) -> None:
    source = embedded("int4")
    model, tensors = stream_bundle(source)
    earlier = dataclasses.replace(model, decoder_config=dataclasses.replace(model.decoder_config, ffn_block=64))
    made = save_bundle(tmp_path / "three", model=earlier, decoder_tensors=tensors, num_ranks=3)
    assert read_manifest(made)["ffn_block"] == 64
    edit(lambda manifest: manifest.pop("ffn_block"))(made)

    parts = []
    for rank in range(3):
        loaded, tensors = stream_bundle(made, ranks=Place(rank, 3))
        parts.append(dict(tensors)["layers.0.feed_forward.down.weight"])
        assert share_of(loaded.decoder_config, Place(rank, 3)).ffn_dim == [192, 192, 128][rank]
    assert torch.equal(torch.cat(parts, dim=1), dict(stream_bundle(source)[1])["layers.0.feed_forward.down.weight"])


def test_damaged_numbers_are_refused(own: Path) -> None:
    wrong: dict[str, tuple[str, tuple[object, ...]]] = {
        "ffn_block": ("invalid configuration: ffn_block must be", (0, "64", None, True)),
        # A decoder that is whole has no `num_ranks`.
        "num_ranks": ("incomplete or wrong in `num_ranks`", (0, -2, 10**9, "2", None, 2.0, 1)),
    }
    for name, (words, values) in wrong.items():
        good = read_manifest(own)[name]
        for value in values:
            edit_manifest(**{name: value})(own)
            with pytest.raises(CheckpointError, match=words):
                part(own, 0, 2)
            edit_manifest(**{name: good})(own)


@pytest.mark.parametrize(
    ("name", "flags", "code", "said"),
    [
        ("named", [], 2, "convert --model splits a bundle, and --tensor-parallel is missing"),
        ("named", ["--tensor-parallel", "2"], 0, "split for 2 ranks"),
        ("~/named", ["--tensor-parallel", "2"], 0, "split for 2 ranks"),
        ("~/named", ["--lora", "absent"], 1, "`absent` is no LoRA folder"),
    ],
)
def test_convert_finds_a_bundle_by_its_name(
    name: str,
    flags: list[str],
    code: int,
    said: str,
    split: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("LLAMA_ADAPTER_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "named").symlink_to(embedded_model())
    command = ["convert", "--model", name, *flags, "--out", str(tmp_path / "out")]
    assert main(command) == code
    assert said in " ".join(capsys.readouterr().err.split())
    if code == 0:
        assert_same(part(tmp_path / "out", 0, 2), part(split, 0, 2))
        assert main(command) == 1  # the output exists, and --force is missing
