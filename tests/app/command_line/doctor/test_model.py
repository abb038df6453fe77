"""The doctor finds no fault in intact models and exported decoders, and every fault in damaged ones."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.command_line.doctor.decoder import diagnose_decoder
from llama_adapter.app.command_line.doctor.findings import Finding
from llama_adapter.app.command_line.doctor.model import diagnose, write_known_answer
from llama_adapter.app.models.bundle import add_known_answer, save_bundle
from llama_adapter.app.models.bundle_manifest import Manifest
from llama_adapter.app.models.checkpoints import RELEASED_ADAPTERS
from llama_adapter.app.models.spec import CaptionerSpec
from tests.app.assembled import assemble_sources
from tests.app.exported import exported_embedded, exported_golden
from tests.app.golden import GOLDEN, model_options, picture
from tests.app.models.bundles import edit, edit_known_answer, edit_manifest
from tests.llm.gguf_files import sentencepiece_keys, write_model

SOURCES = CaptionerSpec(**model_options())
ADAPTER, CLIP = (Path(model_options()[name]) for name in ("adapter", "clip"))


def examined(target: CaptionerSpec | Path) -> list[Finding]:
    return diagnose(target if isinstance(target, CaptionerSpec) else CaptionerSpec(model=str(target)))


def errors(target: CaptionerSpec | Path) -> list[Finding]:
    return [finding for finding in examined(target) if finding.level == "error"]


def changed(**changes: Any) -> CaptionerSpec:
    return dataclasses.replace(SOURCES, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bundle(tmp_path_factory.mktemp("saved") / "bundle", model=assemble_sources(SOURCES))


@pytest.fixture
def bundle(tmp_path: Path, saved: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "bundle"))


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", "training-checkpoint-0"])
def test_an_intact_model_has_no_faults(adapter: str) -> None:
    findings = diagnose(changed(adapter=GOLDEN / "adapters" / f"{adapter}.pth"))
    assert {finding.level for finding in findings} == {"ok"}
    assert {"llama", "tokenizer", "adapter", "clip", "vision"} <= {finding.what for finding in findings}


def test_an_intact_gguf_file_has_no_faults(tmp_path: Path) -> None:
    import transformers

    processor = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "LLaMA" / "tokenizer.model"))
    model = transformers.LlamaForCausalLM.from_pretrained(GOLDEN / "LLaMA-HF" / "TINY")
    file = write_model(tmp_path / "tiny.gguf", model, sentencepiece_keys(processor))
    findings = diagnose(changed(llama_dir=file, llama_type=None))
    assert {finding.level for finding in findings} == {"ok"}
    assert any("LLaMA in GGUF's form, 1 file(s)" in finding.sentence for finding in findings)
    file.write_bytes(file.read_bytes()[:-100])
    assert {finding.what for finding in errors(changed(llama_dir=file, llama_type=None))} == {"llama", "tokenizer"}


def test_an_intact_bundle_has_no_faults_and_without_a_known_answer_it_is_not_run(bundle: Path) -> None:
    *findings, last = examined(bundle)
    assert {finding.level for finding in findings} == {"ok"}
    assert (last.level, last.what) == ("not tried", "known answer")


def test_a_bundle_that_is_replaced_while_it_is_checked_is_checked_again(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = assemble_sources(changed(adapter=GOLDEN / "adapters" / "LORA-BIAS-TINY.pth"))

    def read_late(manifest: Manifest) -> Any:
        monkeypatch.undo()
        save_bundle(bundle, model=second, overwrite=True)
        return manifest.configs()

    monkeypatch.setattr(Manifest, "configs", read_late)
    findings = examined(bundle)

    assert [finding for finding in findings if finding.level == "error"] == []
    assert "LORA-BIAS-TINY" in findings[0].sentence


# Damaged files: each function damages a copy of the LLaMA folder, or makes another adapter, and returns the sources.


def llama(folder: Path, **changes: Any) -> CaptionerSpec:
    return changed(llama_dir=shutil.copytree(GOLDEN / "LLaMA", folder / "LLaMA"), **changes)


def missing_shard(folder: Path) -> CaptionerSpec:
    sources = llama(folder, llama_type="TINY-2SHARD")
    (folder / "LLaMA" / "TINY-2SHARD" / "consolidated.01.pth").unlink()
    return sources


def flipped_bit(folder: Path) -> CaptionerSpec:
    sources, file = llama(folder), folder / "LLaMA" / "TINY" / "consolidated.00.pth"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1  # the file still opens and looks right
    file.write_bytes(data)
    return sources


def smaller_vocabulary(folder: Path) -> CaptionerSpec:
    sources, file = llama(folder), folder / "LLaMA" / "TINY" / "consolidated.00.pth"
    tensors = torch.load(file, weights_only=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        tensors[name] = tensors[name][:500].clone()
    torch.save(tensors, file)
    file.with_name("checklist.chk").unlink()
    return sources


def truncated(folder: Path) -> CaptionerSpec:
    for source in (ADAPTER, CLIP):
        (folder / source.name).write_bytes(source.read_bytes()[:200_000])
    return changed(adapter=folder / ADAPTER.name, clip=folder / CLIP.name)


def empty(folder: Path) -> CaptionerSpec:
    (folder / ADAPTER.name).touch()
    return changed(adapter=folder / ADAPTER.name)


def edited_adapter(folder: Path, edit: Callable[[dict[str, Any]], object]) -> CaptionerSpec:
    content = torch.load(ADAPTER, weights_only=True)
    edit(content["model"])
    torch.save(content, folder / "edited.pth")
    return changed(adapter=folder / "edited.pth")


def untrained(folder: Path) -> CaptionerSpec:
    gates = {f"llama.layers.{layer}.attention.gate": torch.zeros(1, 4, 1, 1) for layer in range(4)}
    return edited_adapter(folder, lambda tensors: tensors.update(gates))


# What readers of files find is tested with these. Here each check fails once, and the others go on.
FAULTY: dict[str, Callable[[Path], CaptionerSpec | Path]] = {
    "nothing is there": lambda folder: CaptionerSpec(llama_dir="no-llama", adapter="no-adapter.pth", clip="no-clip.pt"),
    "no bundle": lambda folder: folder / "absent",
    "adapter and CLIP swapped": lambda folder: changed(adapter=CLIP, clip=ADAPTER),
    "missing shard": missing_shard,
    "flipped bit": flipped_bit,
    "smaller vocabulary": smaller_vocabulary,
    "number of heads unknown": lambda folder: changed(visual_heads=None),
    "digest of another file": lambda folder: changed(
        adapter=shutil.copy(ADAPTER, folder / f"{next(iter(RELEASED_ADAPTERS))}_BIAS-7B.pth")
    ),
    "cut short": truncated,
    "empty": empty,
    "adapter as CLIP too": lambda folder: changed(clip=ADAPTER),
    "not a number": lambda folder: edited_adapter(folder, lambda tensors: tensors["clip_proj.bias"].fill_(torch.nan)),
    "untrained": untrained,
}


def test_every_fault_is_a_finding(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    found = {}
    for name, damaged in FAULTY.items():
        (folder := tmp_path / name).mkdir()
        found[name] = faults(damaged(folder), folder)
    assert found == snapshot


def faults(target: CaptionerSpec | Path, folder: Path) -> str:
    """All findings that are not ok, with paths and digests replaced."""
    found = [one for one in examined(target) if one.level != "ok"]
    text = "\n".join(f"{one.level} {one.what}: {one.sentence} [{one.hint}]" for one in found)
    text = text.replace(str(folder), "FOLDER").replace(str(GOLDEN), "GOLDEN")
    return re.sub(r"\b[0-9a-f]{32}(?:[0-9a-f]{32})?(?=\b|_)", "DIGEST", text)


@pytest.mark.parametrize("name", ["../outside.bin", "{outside}", "sub/file", "..", "*../outside.bin", "\x1b[2Jx\x9b"])
def test_a_checklist_cannot_name_files_elsewhere(name: str, tmp_path: Path) -> None:
    sources, outside = llama(tmp_path), tmp_path / "LLaMA" / "outside.bin"
    outside.write_bytes(b"secret")
    digest = hashlib.md5(outside.read_bytes()).hexdigest()
    with open(tmp_path / "LLaMA" / "TINY" / "checklist.chk", "a", encoding="utf-8") as checklist:
        checklist.write(f"{digest} {name.format(outside=outside)}\n")

    [found] = [finding for finding in diagnose(sources) if finding.level != "ok"]

    assert (found.level, found.what) == ("error", "llama")
    assert digest not in found.sentence
    assert found.sentence.isprintable()


@pytest.mark.slow
def test_a_known_answer_that_was_written_is_replayed_and_half_precision_may_differ(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_known_answer(bundle)
    known = json.loads((bundle / "known_answer.json").read_text())

    assert (known["text"], known["dtype"]) == (text, "float32")
    edit_manifest(prompt="What else is there?")(bundle)  # the answer is to its own prompt
    monkeypatch.delattr("PIL.Image.open")  # this process must not decode the bundle's picture
    finding = examined(bundle)[-1]
    assert (finding.level, finding.what) == ("ok", "known answer")
    assert f"{text!r} about its own picture on cpu in float32" in finding.sentence
    known["text"] = "something else"
    older = {name: value for name, value in known.items() if name != "dtype"}
    for entries, level in ((known | {"dtype": "bfloat16"}, "warning"), (known, "error"), (older, "error")):
        edit_known_answer(bundle, **entries)
        finding = examined(bundle)[-1]
        assert (finding.level, "'something else'" in finding.sentence) == (level, True)
    monkeypatch.setattr("llama_adapter.app.models.number_formats.DtypeChoice._best", lambda *_: ("bfloat16", "a whim"))
    assert examined(bundle)[-1].level == "warning"  # rounding may change a word


def test_a_known_answer_that_cannot_be_replayed_is_a_finding(bundle: Path, snapshot: SnapshotAssertion) -> None:
    add_known_answer(bundle, known_answer={"prompt": "?", "text": "!"}, picture=picture())
    known = json.loads((bundle / "known_answer.json").read_text())
    impossible: list[dict[str, Any]] = [
        {"max_new_tokens": "x"},
        {"max_new_tokens": -1},
        {"input": 5},
        {"prompt": "word " * 4000},
        {"prompt": "\ud800"},
        {"picture": "../shapes.jpg"},
    ]
    told = []
    for entries in impossible:
        edit_known_answer(bundle, **{**known, **entries})
        told.append(faults(bundle, bundle.parent))
    assert told == snapshot


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipes_in_place_of_files_are_findings_and_are_not_opened(bundle: Path) -> None:
    names = {"vision.safetensors", "llm.safetensors", "tokenizer.model"}
    for name in names:
        (bundle / name).unlink()
        os.mkfifo(bundle / name)
    assert {finding.what for finding in errors(bundle)} == names


def test_all_damaged_files_of_a_bundle_are_findings(bundle: Path, snapshot: SnapshotAssertion) -> None:
    for name in ("vision.safetensors", "llm.safetensors"):
        data = bytearray((bundle / name).read_bytes())
        data[-1] ^= 1  # the size stays the same, so loading alone would not notice
        (bundle / name).write_bytes(data)
    (bundle / "tokenizer.model").unlink()
    edit(lambda manifest: manifest["vision"].update(channel_order="bgr"))(bundle)  # an edit by hand
    assert faults(bundle, bundle.parent) == snapshot


def test_a_llama_alone_is_checked() -> None:
    found = diagnose(CaptionerSpec(llama_dir=GOLDEN / "LLaMA", llama_type="TINY"))
    assert {(finding.level, finding.what) for finding in found} == {("ok", "llama"), ("ok", "tokenizer")}


def told(folder: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in diagnose_decoder(CaptionerSpec(decoder=folder))]


def test_a_whole_exported_decoder_answers() -> None:
    findings = diagnose_decoder(CaptionerSpec(decoder=exported_embedded()))

    assert [finding.level for finding in findings] == ["ok", "ok", "ok"]
    assert "'a small yellow moon above a small green cross'" in findings[-1].sentence


def test_faults_of_an_exported_decoder_are_findings(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    shutil.copytree(exported_embedded(), folder)
    (folder / "decoder.weights").write_bytes(b"0")

    assert told(str(folder)) == [("error", "decoder")]
    assert told(str(tmp_path / "missing")) == [("error", "decoder")]
    assert told(exported_golden("BIAS-TINY")) == [("ok", "decoder"), ("error", "decoder")]
