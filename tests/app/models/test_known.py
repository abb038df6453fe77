"""What is known of a model from an earlier load, and when that is no longer used."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.models import known
from llama_adapter.app.models.known import KnownModel, marks_of
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.vision.pixels import PixelRule

INFO = ModelInfo(
    name="toy",
    digest="d",
    device="cpu",
    dtype="float32",
    precision="float",
    vision="torch",
    mode="eager",
    operators="native",
    encoder=None,
    context=64,
    default_prompt="Describe.",
    notes=("a note",),
)

_PLACE = known._place  # tests/conftest.py replaces it


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptionerSpec:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(known, "may_have_accelerator", lambda: False)
    monkeypatch.setattr(known, "_place", _PLACE)
    shutil.copytree(embedded_model(), tmp_path / "model")
    spec = CaptionerSpec(model=str(tmp_path / "model"))
    loaded = dataclasses.replace(spec, device="cpu", dtype="float32", mode="eager")
    KnownModel(spec=loaded, info=INFO, pixels=PixelRule(image_size=64)).remember(spec, files=marks_of(spec))
    return spec


def test_a_model_that_was_loaded_is_known_with_the_present_ways_of_reading(spec: CaptionerSpec) -> None:
    found = KnownModel.recall(dataclasses.replace(spec, reading="fast", batch_size=3))

    assert found is not None
    assert (found.info, found.pixels) == (INFO, PixelRule(image_size=64))
    wanted = {"device": "cpu", "dtype": "float32", "mode": "eager", "reading": "fast", "batch_size": 3}
    assert found.spec == dataclasses.replace(spec, **wanted)


@pytest.mark.parametrize(
    "other",
    [{"dtype": "bfloat16"}, {"context": 32}, {"device": "cuda"}, {"batch_size": "auto"}, {"precision": "int8"}],
    ids=str,
)
def test_another_computation_is_not_known(spec: CaptionerSpec, other: dict[str, Any]) -> None:
    assert KnownModel.recall(dataclasses.replace(spec, **other)) is None


def test_a_model_whose_files_have_changed_is_not_known(spec: CaptionerSpec) -> None:
    (Path(str(spec.model)) / "new.json").write_text("{}")

    assert KnownModel.recall(spec) is None


def test_a_file_in_the_place_of_another_of_its_size_and_time_is_noticed(spec: CaptionerSpec) -> None:
    [weights] = Path(str(spec.model)).glob("llm.safetensors")
    status, content = weights.stat(), weights.read_bytes()
    weights.rename(weights.with_name("old"))
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    weights.with_name("old").unlink()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert KnownModel.recall(spec) is None


def test_a_file_that_changes_while_the_model_is_loaded_is_noticed(spec: CaptionerSpec) -> None:
    found, before = KnownModel.recall(spec), marks_of(spec)
    assert found is not None
    (Path(str(spec.model)) / "manifest.json").write_text("{}")
    found.remember(spec, files=before)

    assert KnownModel.recall(spec) is None


@pytest.mark.parametrize("content", ["", "[]", '{"files": {}}'])
def test_a_damaged_file_is_passed_over(spec: CaptionerSpec, content: str, tmp_path: Path) -> None:
    [file] = (tmp_path / "cache").rglob("*.json")
    file.write_text(content)

    assert KnownModel.recall(spec) is None


def test_with_an_accelerator_only_the_processor_itself_is_known(
    spec: CaptionerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "may_have_accelerator", lambda: True)

    assert KnownModel.recall(spec) is None


def test_with_little_memory_the_number_format_is_chosen_again(
    spec: CaptionerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "free_host_bytes", lambda: 1 << 20)

    assert KnownModel.recall(spec) is None
