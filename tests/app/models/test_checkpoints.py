"""From folders and files as users have them to one loaded model."""

import dataclasses
import hashlib
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llama_adapter.app.models.checkpoints
from llama_adapter.app.models.checkpoints import (
    ModelSources,
    adapter_name,
    assemble_sources,
    claimed_digest,
    find_llama,
)
from llama_adapter.runtime.errors import CheckpointError
from tests.app.models.bundles import GOLDEN, SOURCES

LLAMA = GOLDEN / "LLaMA"
HUGGINGFACE = GOLDEN / "LLaMA-HF" / "TINY"
RELEASED = next(iter(llama_adapter.app.models.checkpoints.RELEASED_ADAPTERS))


def sources(**changes: Any) -> ModelSources:
    return dataclasses.replace(SOURCES, **{"adapter": GOLDEN / "adapters" / "BIAS-TINY.pth", **changes})


def assert_same_weights(one: Any, other: Any) -> None:
    for state, wanted in ((one.vision_state, other.vision_state), (one.decoder_state, other.decoder_state)):
        assert state.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == []


def edited_adapter(tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], name: str = "BIAS-TINY") -> Path:
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(GOLDEN / "adapters" / f"{name}.pth", weights_only=True)
    edit(content["model"])
    torch.save(content, tmp_path / "edited.pth")
    return tmp_path / "edited.pth"


@pytest.mark.parametrize(
    "where",
    [
        {"llama_type": "TINY-2SHARD"},
        {"llama_dir": LLAMA / "TINY", "llama_type": None},
        {"llama_dir": HUGGINGFACE, "llama_type": None},
        {"llama_dir": HUGGINGFACE.parent, "llama_type": "TINY"},
        {"llama_dir": HUGGINGFACE.parent, "llama_type": None},  # its only model
    ],
)
def test_every_way_to_name_a_llama_gives_the_same_model(where: dict[str, Any]) -> None:
    assert_same_weights(assemble_sources(sources(**where)), assemble_sources(sources()))


def test_tokenizer_inside_the_folder_is_preferred_to_the_one_beside(tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "LLaMA")
    (tmp_path / "LLaMA" / "tokenizer.model").replace(tmp_path / "LLaMA" / "TINY" / "tokenizer.model")
    (tmp_path / "LLaMA" / "tokenizer.model").write_bytes(b"another")
    assert find_llama(tmp_path / "LLaMA", llama_type="TINY").tokenizer.parent.name == "TINY"


def test_a_model_says_what_it_was_made_of() -> None:
    model = assemble_sources(sources(adapter=GOLDEN / "adapters" / "LORA-BIAS-TINY.pth", context=77))
    assert [file.role for file in model.sources] == ["llama", "tokenizer", "adapter", "clip"]
    assert model.name == "LORA-BIAS-TINY"
    assert model.merged == ("gates", "lora")
    assert model.decoder_config.context == 77
    assert model.vision_config.channel_order == "rgb"


def test_a_trainer_checkpoint_needs_no_clip_and_wins_over_one() -> None:
    adapter = GOLDEN / "adapters" / "training-checkpoint-0.pth"
    alone, beside = assemble_sources(sources(adapter=adapter, clip=None)), assemble_sources(sources(adapter=adapter))
    assert_same_weights(alone, beside)
    assert [file.role for file in alone.sources] == ["llama", "tokenizer", "adapter"]
    other = assemble_sources(sources())
    assert not torch.equal(alone.vision_state["clip.projection.weight"], other.vision_state["clip.projection.weight"])


def test_public_releases_are_bgr_by_the_digest_in_their_name(tmp_path: Path) -> None:
    released = Path(shutil.copy(GOLDEN / "adapters" / "BIAS-TINY.pth", tmp_path / f"{RELEASED}_BIAS-7B.pth"))
    assert claimed_digest(released) == RELEASED
    assert adapter_name(released) == "BIAS-7B"
    assert assemble_sources(sources(adapter=released)).vision_config.channel_order == "bgr"
    assert assemble_sources(sources(adapter=released, channel_order="rgb")).vision_config.channel_order == "rgb"
    assert assemble_sources(sources(channel_order="bgr")).vision_config.channel_order == "bgr"


def test_a_renamed_release_is_recognised_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256((GOLDEN / "adapters" / "BIAS-TINY.pth").read_bytes()).hexdigest()
    monkeypatch.setattr(llama_adapter.app.models.checkpoints, "RELEASED_ADAPTERS", {digest: "BIAS-TINY"})
    monkeypatch.setattr(llama_adapter.app.models.checkpoints, "_RELEASED_WIDTH", 64)
    model = assemble_sources(sources())
    assert model.vision_config.channel_order == "bgr"
    assert [file.sha256 for file in model.sources if file.role == "adapter"] == [digest]


def test_digest_of_a_model_follows_its_files(tmp_path: Path) -> None:
    adapter = edited_adapter(tmp_path, lambda tensors: tensors["clip_proj.bias"].add_(1))
    assert assemble_sources(sources()).digest == assemble_sources(sources()).digest
    assert assemble_sources(sources(adapter=adapter)).digest != assemble_sources(sources()).digest
    assert assemble_sources(sources(visual_heads=2)).digest != assemble_sources(sources()).digest


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"llama_dir": "nowhere"}, "The LLaMA folder `nowhere` does not exist", "--llama-dir"),
        ({"llama_type": "13B"}, "has no sub-folder `13B`", "`TINY`, `TINY-2SHARD`"),
        ({"llama_type": None}, "is no LLaMA folder", "--llama-type; there are `TINY`, `TINY-2SHARD`"),
        ({"llama_dir": GOLDEN / "images", "llama_type": None}, "is no LLaMA folder", "params.json"),
        ({"llama_dir": LLAMA / "tokenizer.model"}, "is a file", "--llama-dir"),
        ({"adapter": GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"}, "is a TorchScript archive", "--clip"),
        ({"llama_dir": LLAMA / "TINY", "llama_type": "7B"}, "has no sub-folder `7B`", "leave out --llama-type"),
        ({"llama_dir": HUGGINGFACE, "llama_type": "7B"}, "has no sub-folder `7B`", "leave out --llama-type"),
        ({"visual_heads": None}, "how many heads they have is stored in no file", "--visual-heads"),
    ],
)
def test_what_is_wrong_with_the_places_is_told(changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        assemble_sources(sources(**changes))
    assert hint in caught.value.hint


def test_a_llama_without_tokenizer_is_told(tmp_path: Path) -> None:
    shutil.copytree(LLAMA / "TINY", tmp_path / "deep" / "TINY")
    with pytest.raises(CheckpointError, match=r"There is no tokenizer\.model in .* or in the folder above it$"):
        find_llama(tmp_path / "deep", llama_type="TINY").require_tokenizer()
    (tmp_path / "deep" / "TINY" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"only a tokenizer\.json"):
        find_llama(tmp_path / "deep", llama_type="TINY").require_tokenizer()


def test_weights_without_params_are_told(tmp_path: Path) -> None:
    shutil.copytree(LLAMA / "TINY", tmp_path / "TINY")
    (tmp_path / "TINY" / "params.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        find_llama(tmp_path / "TINY")
    assert "params.json is missing" in caught.value.hint


def test_an_adapter_put_together_from_two_is_told(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors["visual_proj.weight"] = torch.ones(32, 48)
        for key in ("visual_proj.bias", "visual_proj_norm.weight", "visual_proj_norm.bias"):
            tensors[key] = torch.ones(32)

    with pytest.raises(
        CheckpointError, match="makes 10 visual queries of width 32, and its LLaMA part reads 10 of width 64"
    ):
        assemble_sources(sources(adapter=edited_adapter(tmp_path, narrow)))
