"""The doctor says what is wrong, all of it, and finds nothing wrong with what is right."""

import dataclasses
import hashlib
import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.doctor.model import Finding, diagnose
from llama_adapter.app.models.bundle import add_known_answer, save_bundle
from llama_adapter.app.models.checkpoints import RELEASED_ADAPTERS, ModelSources, assemble_sources

GOLDEN = Path(__file__).parents[2] / "golden"
ADAPTER = GOLDEN / "adapters" / "BIAS-TINY.pth"
CLIP = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"
SOURCES = ModelSources(llama_dir=GOLDEN / "LLaMA", llama_type="TINY", adapter=ADAPTER, clip=CLIP, visual_heads=4)


def errors(target: Any) -> list[Finding]:
    return [finding for finding in diagnose(target) if finding.level == "error"]


def changed(**changes: Any) -> ModelSources:
    return dataclasses.replace(SOURCES, **changes)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "LLaMA", tmp_path / "LLaMA"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return save_bundle(tmp_path / "bundle", model=assemble_sources(SOURCES))


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", "training-checkpoint-0"])
def test_nothing_is_wrong_with_what_is_right(adapter: str, tmp_path: Path) -> None:
    findings = diagnose(changed(adapter=GOLDEN / "adapters" / f"{adapter}.pth"))
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert {"llama", "tokenizer", "adapter", "clip", "vision"} <= {finding.what for finding in findings}


def test_nothing_is_wrong_with_a_bundle_as_written(bundle: Path) -> None:
    findings = diagnose(bundle)
    assert {finding.level for finding in findings[:-1]} == {"ok"}
    # It has no answer of its own to replay, and that is said: its model was not run.
    assert (findings[-1].level, findings[-1].what) == ("not tried", "known answer")


def test_every_fault_is_told_not_only_the_first() -> None:
    found = errors(ModelSources(llama_dir="no-llama", adapter="no-adapter.pth", clip="no-clip.pt"))
    assert [finding.what for finding in found] == ["llama", "adapter", "clip"]


def test_swapped_files_are_recognised_with_the_right_order() -> None:
    found = errors(changed(adapter=CLIP, clip=ADAPTER))
    assert (
        found[-1].sentence == f"Adapter and CLIP are swapped: `{CLIP}` is a CLIP and `{ADAPTER}` a LLaMA-Adapter file"
    )
    assert found[-1].hint == f"pass --adapter {ADAPTER} --clip {CLIP}"


def test_llama_in_the_place_of_the_adapter_is_recognised() -> None:
    [finding] = errors(changed(adapter=GOLDEN / "LLaMA" / "TINY" / "consolidated.00.pth"))
    assert "is no LLaMA-Adapter file: it is LLaMA weights in Meta's form" in finding.sentence


def test_a_missing_shard_is_told(llama: Path) -> None:
    (llama / "TINY-2SHARD" / "consolidated.01.pth").unlink()
    found = errors(changed(llama_dir=llama, llama_type="TINY-2SHARD"))
    assert "has 1 of 2 shards: each holds 32 of 64 rows" in found[0].sentence
    assert "consolidated.01.pth` is listed in the checklist" in found[1].sentence


def test_a_damaged_file_is_told_by_its_checklist(llama: Path) -> None:
    data = bytearray((llama / "TINY" / "consolidated.00.pth").read_bytes())
    data[len(data) // 2] ^= 1  # one bit: the file opens and looks right
    (llama / "TINY" / "consolidated.00.pth").write_bytes(data)
    [finding] = errors(changed(llama_dir=llama))
    assert "has the MD5 sum" in finding.sentence
    assert "and its checklist names" in finding.sentence


@pytest.mark.parametrize("name", ["../outside.bin", "{outside}", "sub/file", "..", "*../outside.bin", "\x1b[2Jx\x9b"])
def test_a_checklist_cannot_name_files_elsewhere(name: str, llama: Path) -> None:
    outside = llama / "outside.bin"
    outside.write_bytes(b"secret")
    digest = hashlib.md5(outside.read_bytes()).hexdigest()
    with open(llama / "TINY" / "checklist.chk", "a", encoding="utf-8") as checklist:
        checklist.write(f"{digest} {name.format(outside=outside)}\n")

    found = [finding for finding in diagnose(changed(llama_dir=llama)) if finding.level != "ok"]

    assert [finding.level for finding in found] == ["error"]
    assert "which is not the name of a file beside it" in found[0].sentence
    assert digest not in found[0].sentence
    assert found[0].sentence.isprintable()


def test_a_wrong_tokenizer_is_told_with_both_sizes(llama: Path) -> None:
    tensors = torch.load(llama / "TINY" / "consolidated.00.pth", weights_only=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        tensors[name] = tensors[name][:500].clone()
    torch.save(tensors, llama / "TINY" / "consolidated.00.pth")
    (llama / "TINY" / "checklist.chk").unlink()
    [finding] = errors(changed(llama_dir=llama))
    assert "The tokenizer has 512 pieces, and the LLaMA in" in finding.sentence
    assert "has 500 tokens" in finding.sentence


def test_a_llama_of_another_size_is_told(llama: Path) -> None:
    params = json.loads((llama / "TINY" / "params.json").read_text())
    (llama / "TINY" / "params.json").write_text(json.dumps(params | {"n_layers": 40}))
    (llama / "TINY" / "checklist.chk").unlink()
    [finding] = errors(changed(llama_dir=llama))
    assert "says 40 layers, the weights beside it have 4" in finding.sentence


def test_unknown_heads_are_asked_for() -> None:
    [finding] = errors(changed(visual_heads=None))
    assert "how many heads they have is stored in no file" in finding.sentence
    assert "--visual-heads" in finding.hint


def test_a_file_that_is_not_what_its_name_promises_is_told(tmp_path: Path) -> None:
    digest = next(iter(RELEASED_ADAPTERS))
    released = Path(shutil.copy(ADAPTER, tmp_path / f"{digest}_BIAS-7B.pth"))
    [finding] = errors(changed(adapter=released))
    assert finding.sentence.endswith("and its name promises another one")


@pytest.mark.parametrize("kept", [0, 1000, 200_000])
def test_truncated_files_are_told(tmp_path: Path, kept: int) -> None:
    for source in (ADAPTER, CLIP):
        (tmp_path / source.name).write_bytes(source.read_bytes()[:kept])
    found = errors(changed(adapter=tmp_path / ADAPTER.name, clip=tmp_path / CLIP.name))
    assert [finding.what for finding in found] == ["adapter", "clip"]
    assert all("is empty" in finding.sentence or "cut short" in finding.sentence for finding in found)


def edited_adapter(tmp_path: Path, **tensors: Any) -> Path:
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(ADAPTER, weights_only=True)
    content["model"] |= {key.replace("__", "."): value for key, value in tensors.items()}
    torch.save(content, tmp_path / "edited.pth")
    return tmp_path / "edited.pth"


def test_numbers_that_are_none_are_told_with_their_tensor(tmp_path: Path) -> None:
    [finding] = errors(changed(adapter=edited_adapter(tmp_path, clip_proj__bias=torch.full((48,), torch.nan))))
    assert "has numbers that are infinite or none at all, in `clip_proj.bias`" in finding.sentence


def test_tensors_without_numbers_in_a_trainers_clip_are_told(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(GOLDEN / "adapters" / "training-checkpoint-0.pth", weights_only=True)
    content["model"]["clip.visual.proj"] = content["model"]["clip.visual.proj"].to("meta")
    torch.save(content, tmp_path / "edited.pth")
    [finding, *_] = errors(changed(adapter=tmp_path / "edited.pth"))
    assert "holds `clip.visual.proj` as a tensor of another kind (meta_tensor_no_storage)" in finding.sentence


def test_an_untrained_adapter_is_warned_of(tmp_path: Path) -> None:
    zeros = {f"llama__layers__{layer}__attention__gate": torch.zeros(1, 4, 1, 1) for layer in range(4)}
    findings = diagnose(changed(adapter=edited_adapter(tmp_path, **zeros)))
    [warning] = [finding for finding in findings if finding.level == "warning"]
    assert "pictures have no influence" in warning.sentence


def test_the_known_answer_is_replayed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"prompt": "Describe the image.", "max_new_tokens": 4}
    picture = GOLDEN / "images" / "shapes_200x300.jpg"
    [answer] = Captioner.load(bundle).generate([picture], known["prompt"], max_new_tokens=4)
    add_known_answer(bundle, known_answer={**known, "text": answer.text}, picture=picture)
    # The picture is the bundle's: no decoder opens it in this process.
    monkeypatch.delattr("PIL.Image.open")
    finding = diagnose(bundle)[-1]
    assert (finding.level, finding.what) == ("ok", "known answer")
    assert repr(answer.text) in finding.sentence
    add_known_answer(bundle, known_answer={**known, "text": "something else"}, picture=picture)
    [finding] = errors(bundle)
    assert finding.sentence.endswith("and should answer 'something else'")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"max_new_tokens": "x"}, "cannot be replayed"),
        ({"max_new_tokens": -1}, "cannot be replayed"),
        ({"input": 5}, "cannot be replayed"),
        ({"prompt": "word " * 4000}, "cannot be replayed: The prompt has"),
        ({"prompt": "\ud800"}, "cannot be replayed: The text cannot be encoded"),
        ({"picture": "../shapes.jpg"}, "a picture of this folder"),
    ],
)
def test_an_impossible_known_answer_is_a_finding(bundle: Path, entries: dict[str, Any], message: str) -> None:
    add_known_answer(bundle, known_answer={"prompt": "?", "text": "!"}, picture=GOLDEN / "images" / "tiny_10x10.png")
    data = json.dumps(json.loads((bundle / "known_answer.json").read_text()) | entries).encode()
    (bundle / "known_answer.json").write_bytes(data)
    manifest = json.loads((bundle / "manifest.json").read_text())
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"]["known_answer.json"] = entry
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    [finding] = errors(bundle)
    assert finding.what == "known answer"
    assert message in finding.sentence


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_in_the_place_of_a_bundles_files_are_told_and_not_waited_for(bundle: Path) -> None:
    for name in ("vision.safetensors", "llm.safetensors", "tokenizer.model"):
        (bundle / name).unlink()
        os.mkfifo(bundle / name)
    assert len([finding for finding in errors(bundle) if "regular file" in finding.sentence]) == 3


def test_all_damaged_files_of_a_bundle_are_told(bundle: Path) -> None:
    for name in ("vision.safetensors", "llm.safetensors"):
        data = bytearray((bundle / name).read_bytes())
        data[-1] ^= 1  # the size stays, so loading alone would not see it
        (bundle / name).write_bytes(data)
    (bundle / "tokenizer.model").unlink()
    found = errors(bundle)
    assert {"vision.safetensors", "llm.safetensors", "tokenizer.model"} == {finding.what for finding in found}
    assert "has the SHA-256" in found[0].sentence
    assert found[2].sentence == "The bundle lacks `tokenizer.model`"


def test_a_manifest_changed_by_hand_is_told(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"rgb"', '"bgr"'))
    [finding] = errors(bundle)
    assert "digest of the model is not that of its files and configuration" in finding.sentence


def test_a_place_without_a_model_is_told(tmp_path: Path) -> None:
    [finding] = errors(tmp_path / "absent")
    assert "is no model bundle: it does not exist" in finding.sentence


def test_a_missing_tokenizer_does_not_keep_the_tensors_from_being_checked(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "LLaMA/TINY", tmp_path / "LLaMA/TINY")
    sources = ModelSources(
        llama_dir=tmp_path / "LLaMA",
        llama_type="TINY",
        adapter=GOLDEN / "adapters/BIAS-TINY.pth",
        clip=GOLDEN / "CLIP/tiny-vit-torchscript.pt",
        visual_heads=4,
    )
    findings = diagnose(sources)
    (error,) = (finding for finding in findings if finding.level == "error")
    assert error.what == "tokenizer"
    assert "no tokenizer.model" in error.sentence
    assert any("none missing or unknown" in finding.sentence for finding in findings)
    assert any("fit this LLaMA" in finding.sentence for finding in findings)
