"""The sources of the tiny model, comparisons of models, and ways to damage a bundle."""

import dataclasses
import hashlib
import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_adapter.app.models.bundle import load_bundle, save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import quantise_model
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.scheme import find_scheme

GOLDEN = Path(__file__).parents[2] / "golden"
PICTURE = GOLDEN / "images" / "tiny_10x10.png"
SOURCES = CaptionerSpec(
    llama_dir=GOLDEN / "LLaMA",
    llama_type="TINY",
    adapter=GOLDEN / "adapters" / "LORA-BIAS-TINY.pth",
    clip=GOLDEN / "CLIP" / "tiny-vit-torchscript.pt",
    visual_heads=4,
)

Damage = Callable[[Path], object]


def assert_same(ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Tensors have the same names, types and values."""
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def states(model: LoadedModel) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    return model.vision_state, model.decoder_state


def assert_same_weights(ours: LoadedModel, wanted: LoadedModel) -> None:
    for one, other in zip(states(ours), states(wanted), strict=True):
        assert_same(one, other)


def another(model: LoadedModel) -> LoadedModel:
    """A model `second` of the same form, with other weights."""
    vision, decoder = ({name: tensor * 2 for name, tensor in state.items()} for state in states(model))
    return dataclasses.replace(model, name="second", vision_state=vision, decoder_state=decoder)


def older_int4(place: Path) -> Path:
    """The embedded model in 4 bits, written as before the head had 8 bits."""
    plain = load_bundle(embedded_model())
    model, tensors = quantise_model(plain, plain.decoder_state.items(), dtype=torch.float16, precision="int4")
    head = find_scheme("int4").quantise(plain.decoder_state["head.weight"])
    state = dict(tensors) | {f"head.weight{suffix}": part for suffix, part in head.items()}
    return save_bundle(place, model=dataclasses.replace(model, decoder_state=state, finer_weights={}))


def before_first_call(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Let `act` happen when a function of `app.models` is called for the first time, before it begins."""
    module, _, function = name.rpartition(".")
    plain = getattr(importlib.import_module(f"llama_adapter.app.models.{module}"), function)

    def late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        act()
        return plain(*arguments, **options)

    monkeypatch.setattr(f"llama_adapter.app.models.{name}", late)


def refusals(source: Path, folder: Path, damages: Iterable[Damage]) -> str:
    """A line for each damage: the message with which a copy of the bundle, in `folder`, is refused."""
    told = []
    for number, damage in enumerate(damages):
        bundle = Path(shutil.copytree(source, folder / str(number)))
        damage(bundle)
        with pytest.raises(CheckpointError) as caught:
            load_bundle(bundle)
        # Without Python's wording, which depends on the version.
        told.append(re.sub(r"(is no JSON|__init__\(\)).*", r"\1", caught.value.message.replace(str(bundle), "BUNDLE")))
    return "\n".join(told)


def edit(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the manifest."""

    def apply(place: Path) -> None:
        manifest = json.loads((place / "manifest.json").read_text())
        change(manifest)
        (place / "manifest.json").write_text(json.dumps(manifest))

    return apply


def edit_known_answer(place: Path, **entries: Any) -> None:
    """Replace a bundle's known answer, and update its digest."""
    data = json.dumps(entries).encode()
    (place / "known_answer.json").write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(lambda manifest: manifest["files"].update({"known_answer.json": entry}))(place)


def edit_manifest(**entries: Any) -> Damage:
    return edit(lambda manifest: manifest.update(entries))


def edit_config(half: str, **entries: Any) -> Damage:
    """Change sizes in the manifest; `clip` and `query` are the two parts of the vision half."""
    return edit(lambda manifest: (manifest["llm"] if half == "llm" else manifest["vision"][half]).update(entries))


def name_a_file(name: str) -> Damage:
    return edit(lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": ""}}))


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """Change the decoder's tensors and update the manifest, so that only their content is wrong."""

    def apply(place: Path) -> None:
        file = place / "llm.safetensors"
        tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
        change(tensors)
        save_file(tensors, file)
        entry = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
        edit(lambda manifest: manifest["files"].update({file.name: entry}))(place)

    return apply
