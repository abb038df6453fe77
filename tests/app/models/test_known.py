"""What is known of a model from an earlier load, and when that is no longer used."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.models import known
from llama_adapter.app.models.known import KnownModel, marks_of
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.vision.pixels import PixelRule
from tests.app.toys import INFO as TOY

INFO = dataclasses.replace(TOY, notes=("a note",))
_PLACE = known._place  # tests/conftest.py replaces it


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptionerSpec:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("llama_adapter.app.models.spec.may_have_accelerator", lambda: False)
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
def test_another_computation_is_not_known_and_no_file_is_looked_at_for_it(
    spec: CaptionerSpec, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "batch_size" not in other:
        monkeypatch.setattr(known, "marks_of", pytest.fail)
    assert KnownModel.recall(dataclasses.replace(spec, **other)) is None


def replace_weights(model: Path) -> None:
    """Put another file of the same size and time in the place of the weights."""
    weights = model / "llm.safetensors"
    status, content = weights.stat(), weights.read_bytes()
    weights.rename(weights.with_name("old"))
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    weights.with_name("old").unlink()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


def damage(content: str) -> Callable[[Path, pytest.MonkeyPatch], object]:
    """Replace what is known."""
    return lambda model, patch: next(model.with_name("cache").rglob("*.json")).write_text(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: (model / "new.json").write_text("{}"),
        lambda model, patch: replace_weights(model),
        *map(damage, ("", "[]", '{"files": {}}')),
        lambda model, patch: patch.setattr("llama_adapter.app.models.spec.may_have_accelerator", lambda: True),
        lambda model, patch: patch.setattr(known, "free_host_bytes", lambda: 1 << 20),  # other number formats may fit
    ],
)
def test_after_a_change_a_model_is_not_known(
    change: Callable[[Path, pytest.MonkeyPatch], object], spec: CaptionerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(Path(str(spec.model)), monkeypatch)

    assert KnownModel.recall(spec) is None


def test_a_change_replaces_what_is_known(spec: CaptionerSpec) -> None:
    found, before = KnownModel.recall(spec), marks_of(spec)
    assert found is not None
    (Path(str(spec.model)) / "answers.jsonl").write_text("{}")
    found.remember(spec, files=before)  # the file changed while the model was loaded
    assert KnownModel.recall(spec) is None
    found.remember(spec, files=marks_of(spec))

    assert KnownModel.recall(spec) == found
    assert len(list(Path(str(spec.model)).with_name("cache").rglob("*.json"))) == 1


def test_a_relative_path_is_another_model_in_another_folder(
    spec: CaptionerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, relative = KnownModel.recall(spec), dataclasses.replace(spec, model="model")
    assert found is not None
    shutil.copytree(tmp_path / "model", tmp_path / "other" / "model", copy_function=os.link)  # the same marks
    monkeypatch.chdir(tmp_path)
    found.remember(relative, files=marks_of(relative))
    assert KnownModel.recall(relative) is not None

    monkeypatch.chdir("other")

    assert KnownModel.recall(relative) is None
