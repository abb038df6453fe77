"""Bundles are written completely or not at all, mapped when loaded, and refused if they are damaged."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import struct
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.models.bundle import add_known_answer, convert, load_bundle, save_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.sketch import expected_forms
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.schemes.files import TensorWriter
from llama_adapter.runtime.schemes.scheme import TensorForm
from tests.app.models.bundles import (
    GOLDEN,
    PICTURE,
    SOURCES,
    Damage,
    another,
    assert_same_weights,
    before_first_call,
    edit_config,
    edit_manifest,
    edit_tensors,
    name_a_file,
    refusals,
    states,
)
from tests.llm.toys import is_mapped


@pytest.mark.proves("bundles", "CPU")
def test_a_bundle_gives_back_exactly_what_was_saved(bundle: Path, model: LoadedModel) -> None:
    loaded = load_bundle(bundle)
    assert_same_weights(loaded, model)
    assert (loaded.vision_config, loaded.decoder_config) == (model.vision_config, model.decoder_config)
    assert loaded.tokenizer.data == model.tokenizer.data
    assert (loaded.name, loaded.merged, loaded.prompt) == (model.name, model.merged, model.prompt)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_tensors_of_a_bundle_are_mapped_and_not_copied(bundle: Path) -> None:
    loaded = load_bundle(bundle, dtype=torch.float32)
    assert all(is_mapped(tensor, bundle / "llm.safetensors") for tensor in loaded.decoder_state.values())
    assert all(is_mapped(tensor, bundle / "vision.safetensors") for tensor in loaded.vision_state.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_convert_writes_any_precision_and_loading_casts(tmp_path: Path, model: LoadedModel, dtype: torch.dtype) -> None:
    stored = load_bundle(convert(SOURCES, tmp_path / "bundle", dtype=dtype))
    assert stored.dtype == dtype
    cast = load_bundle(tmp_path / "bundle", dtype=torch.float32)
    for one, other, wanted in zip(states(stored), states(cast), states(model), strict=True):
        assert all(torch.equal(one[key], wanted[key].to(dtype)) for key in wanted)
        assert all(torch.equal(other[key], wanted[key].to(dtype).float()) for key in wanted)


def test_what_cannot_be_saved_leaves_nothing_behind(tmp_path: Path, model: LoadedModel) -> None:
    state = {key: tensor for key, tensor in model.decoder_state.items() if key != "norm.weight"}
    for wrong, named in ((state, "norm.weight"), ({**state, "more": torch.ones(2)}, "more")):
        with pytest.raises(ValueError, match=named):
            save_bundle(tmp_path / "bundle", model=dataclasses.replace(model, decoder_state=wrong))
    assert list(tmp_path.iterdir()) == []
    known = {"prompt": "?", "text": "!"}
    with pytest.raises(FileNotFoundError):
        save_bundle(tmp_path / "bundle", model=model, known_answer=known, known_picture=tmp_path / "absent.png")
    assert list(tmp_path.iterdir()) == [], "also after the weights are written"


def test_a_manifest_has_the_names_and_digests_of_the_sources_and_not_their_folders(tmp_path: Path) -> None:
    manifest = read_manifest(convert(SOURCES, tmp_path / "bundle"))
    assert [source["role"] for source in manifest["sources"]] == ["llama", "tokenizer", "adapter", "clip"]
    assert all("/" not in source["path"] and len(source["sha256"]) == 64 for source in manifest["sources"])
    assert str(GOLDEN) not in (tmp_path / "bundle" / "manifest.json").read_text()


def test_the_digest_depends_on_the_model_and_not_on_its_folder_or_known_answer(
    tmp_path: Path, bundle: Path, model: LoadedModel
) -> None:
    again = save_bundle(tmp_path / "again", model=model)
    digest = load_bundle(bundle).digest
    assert load_bundle(again).digest == digest == read_manifest(again).model_digest()
    add_known_answer(again, known_answer={"prompt": "?", "text": "!"}, picture=PICTURE)
    assert load_bundle(again).digest == digest
    half = convert(SOURCES, tmp_path / "half", dtype=torch.float16)
    assert load_bundle(half).digest != digest


def test_the_question_that_a_model_learned_goes_into_every_bundle_made_of_it(
    tmp_path: Path, bundle: Path, model: LoadedModel
) -> None:
    assert "question" not in read_manifest(bundle)
    asked = {"prompt": "Describe it.", "question": "Which of {these} is it?"}
    whole = save_bundle(tmp_path / "whole", model=dataclasses.replace(model, **asked))  # type: ignore[arg-type]
    rounded = quantise_bundle(QuantiseJob(model=str(whole), out=str(tmp_path / "int8")))
    for place in (whole, rounded):
        loaded = load_bundle(place)
        assert {"prompt": loaded.prompt, "question": loaded.question} == asked
    assert load_bundle(whole).digest == load_bundle(bundle).digest, "a record has its question, and the same model"


def test_overrides_at_load_take_effect(bundle: Path) -> None:
    loaded = load_bundle(bundle, context=99, channel_order="bgr")
    assert (loaded.decoder_config.context, loaded.vision_config.channel_order) == (99, "bgr")
    assert loaded.digest != load_bundle(bundle).digest == load_bundle(bundle, context=99, channel_order="rgb").digest


def test_a_known_answer_travels_with_its_picture(tmp_path: Path, model: LoadedModel) -> None:
    known = {"prompt": "What?", "text": "A square.", "max_new_tokens": 5}
    place = save_bundle(tmp_path / "bundle", model=model, known_answer=known, known_picture=PICTURE)
    stored = json.loads((place / "known_answer.json").read_text())
    assert stored == {**known, "picture": "known_answer.png"}
    assert (place / "known_answer.png").read_bytes() == PICTURE.read_bytes()
    assert {"known_answer.json", "known_answer.png"} <= read_manifest(place)["files"].keys()
    with pytest.raises(ValueError, match="needs a picture"):  # a model for texts has none
        add_known_answer(place, known_answer={"prompt": "What?"}, picture=None)


def test_files_that_are_not_of_a_bundle_are_never_deleted(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("llama_adapter.app.models.bundle.stream_sources")  # nothing is converted before a look
    (holiday := bundle.parent / "holiday").mkdir()
    for file in (holiday / "beach.jpg", bundle / "NOTES.txt"):
        file.write_text("mine")
        with pytest.raises(CheckpointError):
            convert(SOURCES, file.parent, overwrite=True)
        assert file.read_text() == "mine"


def test_a_bundle_is_replaced_only_with_overwrite_also_through_a_link_and_as_the_current_folder(
    bundle: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError):
        save_bundle(bundle, model=model)
    link = bundle.parent / "link"
    link.symlink_to(bundle)
    save_bundle(link, model=dataclasses.replace(model, name="by link"), overwrite=True)
    assert link.is_symlink()
    assert load_bundle(bundle).name == "by link"
    monkeypatch.chdir(bundle)
    save_bundle(".", model=dataclasses.replace(model, name="from inside"), overwrite=True)
    assert load_bundle(bundle).name == "from inside"
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle", "link"]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("fails", [True, False])
def test_a_replacement_that_is_disturbed_leaves_one_whole_bundle(
    fails: bool, number: int, bundle: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move of a folder with this number fails, or another process moves its own bundle to the path before it."""
    other, replace = save_bundle(bundle.parent / "other", model=dataclasses.replace(model, name="other")), os.replace
    moves = itertools.count(1)

    def disturbed(source: Path, target: Path) -> None:
        if Path(source).is_dir() and next(moves) == number:
            if fails:
                raise OSError("busy")
            shutil.rmtree(bundle, ignore_errors=True)
            replace(other, bundle)
        replace(source, target)

    monkeypatch.setattr("llama_adapter.runtime.atomic_write.os.replace", disturbed)
    with pytest.raises(OSError, match="busy") if fails else nullcontext():
        save_bundle(bundle, model=dataclasses.replace(model, name="last"), overwrite=True)

    assert load_bundle(bundle).name == (model.name if fails else "last")
    assert {path.name for path in bundle.parent.iterdir()} == ({"bundle", "other"} if fails else {"bundle"})


@pytest.mark.parametrize("reader", ["read_vision", "read_decoder"])
def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(
    bundle: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    second = another(model)
    before_first_call(monkeypatch, f"bundle.{reader}", lambda: save_bundle(bundle, model=second, overwrite=True))
    loaded = load_bundle(bundle)

    assert loaded.name == "second"
    assert_same_weights(loaded, second)


@pytest.mark.parametrize("is_encoded_elsewhere", [True, False])
def test_an_encoder_that_is_not_used_takes_no_memory(is_encoded_elsewhere: bool, bundle: Path) -> None:
    spec = CaptionerSpec(model=str(bundle))
    model, _ = stream_model(spec, dtype=torch.float16, is_encoded_elsewhere=is_encoded_elsewhere)
    dtype = torch.float32 if is_encoded_elsewhere else torch.float16
    assert {tensor.dtype for tensor in model.vision_state.values()} == {dtype}
    assert all(
        is_mapped(tensor, bundle / "vision.safetensors") == is_encoded_elsewhere
        for tensor in model.vision_state.values()
    )


def test_shapes_are_known_without_memory_for_the_context(model: LoadedModel) -> None:
    endless = dataclasses.replace(model.decoder_config, context=10**13)
    forms = expected_forms(endless, dtype=torch.float32)
    assert forms == {key: TensorForm(tuple(tensor.shape), tensor.dtype) for key, tensor in model.decoder_state.items()}


def test_a_bundle_that_the_disk_has_no_room_for_is_refused_before_anything_is_computed(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1_000))
    computed = (pytest.fail(f"{name} was computed") for name in ["a tensor"])

    with pytest.raises(CheckpointError, match=rf"`{tmp_path}/new/bundle` takes \d\.\d MB.* 0\.0 MB free"):
        save_bundle(tmp_path / "new" / "bundle", model=model, decoder_tensors=computed)
    with pytest.raises(CheckpointError, match="MB free"):
        quantise_bundle(
            QuantiseJob(out=str(tmp_path / "rounded")), round_weights=lambda _: pytest.fail("it was rounded")
        )

    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_named(tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorWriter, "write", write)
    with pytest.raises(OSError, match="No space") as caught:
        save_bundle(tmp_path / "bundle", model=model)

    assert describe(caught.value).sentence == f"No space left on device: `{tmp_path}/bundle`"


def break_header(place: Path) -> None:
    data = bytearray((place / "vision.safetensors").read_bytes())
    data[:8] = struct.pack("<Q", 2**60)
    (place / "vision.safetensors").write_bytes(data)


def edit_as_told(told: dict[str, Any]) -> Damage:
    """The edit of an entry in the table of damaged manifests."""
    [(part, entries)] = told.items()
    if part == "file":
        return name_a_file(entries)
    return edit_manifest(**entries) if part == "manifest" else edit_config(part, **entries)


MANIFESTS = json.loads(Path(__file__).with_name("damaged_manifests.json").read_text(encoding="utf-8"))
DAMAGED: tuple[Damage, ...] = (
    lambda place: (place / "manifest.json").unlink(),
    lambda place: (place / "manifest.json").write_text("{"),
    lambda place: (place / "llm.safetensors").unlink(),
    lambda place: (place / "tokenizer.model").write_bytes(b"x"),
    lambda place: (place / "manifest.json").write_text("[" * 200_000),
    lambda place: (place / "manifest.json").write_text("9" * 5000),
    break_header,
    *map(edit_as_told, MANIFESTS),
    edit_manifest(question="?" * 100_001),
    edit_manifest(prompt="?" * 100_001),
    edit_tensors(lambda t: t.pop("norm.weight")),
    edit_tensors(lambda t: t.update(more=torch.ones(1))),
    edit_tensors(lambda t: t.update({"norm.weight": torch.ones(65)})),
    shutil.rmtree,
    lambda place: (shutil.rmtree(place), place.touch()),
    lambda place: (shutil.rmtree(place), place.mkdir()),
)


def test_a_damaged_bundle_is_refused(saved: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert refusals(saved, tmp_path, DAMAGED) == snapshot


def test_a_source_whose_name_promises_another_digest_is_not_converted(tmp_path: Path) -> None:
    adapter = Path(shutil.copy(GOLDEN / "adapters/BIAS-TINY.pth", tmp_path / f"{'0' * 64}_BIAS-7B.pth"))
    with pytest.raises(CheckpointError, match="SHA-256"):
        convert(dataclasses.replace(SOURCES, adapter=adapter), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
