"""Malicious checkpoints: none of their code runs, they cost little time and memory, and the error is one sentence."""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import open_clip
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import CheckpointError, ExitCode
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.tensor_files.files import read_tensor_file
from tests.app.assembled import assemble_sources
from tests.app.models.bundles import GOLDEN, SOURCES, edit_config, edit_manifest, name_a_file
from tests.fakes.hostile_archive import write_hostile_archive

CLIP = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"
ADAPTER = GOLDEN / "adapters" / "BIAS-TINY.pth"
PATIENCE = 30.0  # seconds; unbounded work would take minutes


def refused(action: Callable[[], object]) -> str:
    """The message of the refusal. Checks that it comes soon, is printable and short."""
    before = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        action()
    assert time.monotonic() - before < PATIENCE
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 3000
    assert describe(caught.value).exit_code == ExitCode.FAILED
    return caught.value.message


def test_code_of_a_torchscript_clip_is_not_run_when_it_is_loaded_or_diagnosed(tmp_path: Path) -> None:
    write_hostile_archive(tmp_path / "clip.pt", target=tmp_path / "written")
    sources = dataclasses.replace(SOURCES, clip=tmp_path / "clip.pt")

    message = refused(lambda: assemble_sources(sources))
    found = [finding for finding in diagnose(sources) if finding.level == "error"]

    assert "holds Python objects beside its tensors (`__torch__." in message
    assert [finding.sentence for finding in found] == [message]
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("layer", [2_999_999, 999_999_999, 10**17, "9" * 5000])
@pytest.mark.parametrize(
    "prefix", ["visual.transformer.resblocks.", "vision_model.encoder.layers."], ids=["OpenAI", "Hugging Face"]
)
def test_a_clip_with_a_tensor_of_a_layer_far_out_is_refused(tmp_path: Path, prefix: str, layer: int | str) -> None:
    tensors = read_tensor_file(CLIP, torchscript=True).tensors if prefix.startswith("visual.") else {}
    save_file(tensors | {f"{prefix}{layer}.ln_1.bias": torch.zeros(1)}, tmp_path / "clip.safetensors")
    assert "tensors" in refused(lambda: open_clip(tmp_path / "clip.safetensors"))


@pytest.mark.parametrize("key", ["visual_blocks.999999999.norm1.bias", "llama.layers.999999999.attention.gate"])
def test_an_adapter_with_a_tensor_of_a_layer_far_out_is_refused(tmp_path: Path, key: str) -> None:
    tensors = read_tensor_file(ADAPTER).tensors | {key: torch.zeros(1)}
    torch.save({"model": tensors}, tmp_path / "adapter.pth")
    message = refused(lambda: assemble_sources(dataclasses.replace(SOURCES, adapter=tmp_path / "adapter.pth")))
    assert "999999999" in message


@pytest.mark.parametrize("far", ["layer", "shard"])
def test_a_llama_with_a_layer_or_shard_far_out_is_refused(tmp_path: Path, far: str) -> None:
    llama = Path(shutil.copytree(GOLDEN / "LLaMA" / "TINY", tmp_path / "llama"))
    shutil.copy(GOLDEN / "LLaMA" / "tokenizer.model", llama)
    if far == "layer":
        tensors = read_tensor_file(GOLDEN / "LLaMA" / "TINY" / "consolidated.00.pth").tensors
        torch.save(tensors | {"layers.99999999.attention_norm.weight": torch.zeros(1)}, llama / "consolidated.00.pth")
        params = json.loads((llama / "params.json").read_text())
        (llama / "params.json").write_text(json.dumps(params | {"n_layers": 100_000_000}))
    else:
        (llama / "consolidated.999999999999.pth").write_bytes(b"x")
    told = refused(lambda: assemble_sources(dataclasses.replace(SOURCES, llama_dir=llama, llama_type=None)))
    assert ("`layers.99999999.*`" if far == "layer" else "lacks `consolidated.01.pth`") in told


@pytest.mark.parametrize(("half", "entry"), [("llm", "num_layers"), ("clip", "num_layers"), ("query", "depth")])
def test_a_bundle_with_more_layers_than_tensors_is_refused_before_modules_are_built(
    bundle: Path, half: str, entry: str
) -> None:
    edit_config(half, **{entry: 100_000_000})(bundle)
    assert "its configuration speaks of 100,000,0" in refused(lambda: load_bundle(bundle))
    assert any("100,000,0" in finding.sentence for finding in diagnose(CaptionerSpec(model=bundle)))


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nlines", "x" * 1000])
def test_names_that_cannot_stand_in_a_line_are_refused(bundle: Path, name: str) -> None:
    for change in (edit_manifest(name=name), name_a_file(name)):
        change(bundle)
        refused(lambda: load_bundle(bundle))


def test_files_of_settings_that_are_too_large_are_not_read(tmp_path: Path, bundle: Path) -> None:
    with (bundle / "manifest.json").open("ab") as file:
        file.truncate(1 << 40)
    assert "16,777,216 at most" in refused(lambda: load_bundle(bundle))
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)
    save_file({"vision_model.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "16,777,216 at most" in refused(lambda: open_clip(tmp_path))


def test_a_bundle_that_others_may_change_is_loaded_with_a_note(bundle: Path, snapshot: SnapshotAssertion) -> None:
    def notes() -> list[str]:
        return [note.replace(str(bundle), "BUNDLE") for note in load_bundle(bundle).notes]

    assert notes() == []
    (bundle / "llm.safetensors").chmod(0o664)  # the group is one of the user's groups
    assert notes() == []
    (bundle / "llm.safetensors").chmod(0o666)
    of_file = notes()
    bundle.chmod(0o777)
    assert [of_file, notes()] == snapshot
    bundle.chmod(0o1777)
    (bundle / "llm.safetensors").chmod(0o644)
    assert notes() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to a group that is not its own")
def test_a_foreign_group_that_may_write_is_noted(bundle: Path) -> None:
    os.chown(bundle / "manifest.json", -1, 54321)
    (bundle / "manifest.json").chmod(0o664)
    assert len(load_bundle(bundle).notes) == 1
