"""Packed bundles: `pack` writes files that are mapped and used directly, or unpacked to the same model elsewhere."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_adapter.app.captioning.assemble_arrays import assemble_arrays
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.packed_bundle import PackJob, pack_bundle
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices.cpu import CpuBackend, is_file_backed
from llama_adapter.runtime.errors import CheckpointError, DeviceError
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.kernels.library import KINDS, Finding, find_library
from llama_adapter.runtime.schemes import PRECISIONS, QUANTISED, Precision
from tests.app.models.bundles import assert_same, assert_same_weights, edit, older_int4
from tests.llm.toys import NEEDS_KERNELS

PICTURE = sorted(sample_pictures().glob("*.png"))[0]
AGAIN = "laid out again"
OTHER = PackedLayout(version=1, block=48, int8_added=1)
pytestmark = NEEDS_KERNELS


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[Precision, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return {name: pack_bundle(PackJob(out=str(folder / name), precision=name)) for name in PRECISIONS}


def opened(**options: Any) -> Captioner:
    return Captioner.from_spec(CaptionerSpec(device="cpu", batch_size=1, **options))


@functools.cache
def plain_ids(**options: Any) -> tuple[int, ...]:
    """The tokens of a caption by the embedded model itself."""
    return opened(**options).caption(PICTURE).token_ids


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_packed_bundle_is_mapped_and_answers_the_same(packed: Any, precision: Precision) -> None:
    captioner = opened(model=str(packed[precision]))
    halves: tuple[Any, ...] = captioner._engine._runner, captioner._vision
    arrays = {name: array for half in halves for name, array in half.arrays.items()}
    memories = [torch.from_numpy(array) for name, array in arrays.items() if name.rpartition(".")[2] in KINDS]

    folded = 1  # normalisation and patch embedding are folded again at each start
    assert is_file_backed(memories).count(False) <= folded
    assert all(memory.data_ptr() % 64 == 0 for memory in memories)
    assert not any(AGAIN in note for note in captioner.info.notes)
    assert captioner.info.precision == precision
    assert captioner.caption(PICTURE).token_ids == plain_ids(precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_unpacks_to_the_plain_model(packed: Any, precision: Precision) -> None:
    plain = load_bundle(embedded_model(), dtype=torch.float32, precision=precision)
    unpacked = load_bundle(packed[precision])

    assert_same_weights(unpacked, plain)
    assert (unpacked.precision, unpacked.packed) == (precision, None)


def test_an_older_bundle_is_packed_with_its_bits(tmp_path: Path) -> None:
    older = older_int4(tmp_path / "older")
    packed = pack_bundle(PackJob(model=str(older), out=str(tmp_path / "packed"), dtype="float32"))

    names = load_file(packed / "llm.safetensors").keys()
    assert {name for name in names if "head" in name} == {"head.weight_packed_int4"}
    assert_same_weights(load_bundle(packed), load_bundle(older, dtype=torch.float32))


@pytest.mark.parametrize("is_older", [False, True])
def test_what_is_added_to_8_bits_does_not_matter_if_all_weights_have_4(
    packed: Any, tmp_path: Path, is_older: bool
) -> None:
    library, place = find_library().library, tmp_path / "bundle"
    assert library is not None
    if is_older:
        pack_bundle(PackJob(model=str(older_int4(tmp_path / "older")), out=str(place), dtype="float32"))
    else:
        shutil.copytree(packed["int4"], place)
    edit(lambda manifest: manifest["packed"].update(int8_added=128 - library.layout.int8_added))(place)
    spec = CaptionerSpec(model=str(place), device="cpu")

    assert (assemble_arrays(spec) is not None) == is_older
    assert (load_bundle(place, take_packed=lambda *_: library.layout).packed is not None) == is_older
    said = " ".join(finding.sentence for finding in diagnose(spec))
    assert ("use its packed weights as they are" in said) == is_older


def test_other_precisions_are_made_of_it(packed: Any, tmp_path: Path) -> None:
    plain = load_bundle(embedded_model(), dtype=torch.float32, precision="int8")
    assert_same(load_bundle(packed["float"], precision="int8").decoder_state, plain.decoder_state)
    widened = load_bundle(packed["int8"], precision="float")
    assert {tensor.dtype for tensor in widened.decoder_state.values()} == {torch.float32}
    with pytest.raises(CheckpointError, match="8-bit weights already"):
        quantise_bundle(QuantiseJob(model=str(packed["int8"]), out=str(tmp_path / "bundle")))
    again = pack_bundle(PackJob(model=str(packed["int8"]), out=str(tmp_path / "again")))
    for file in ("llm.safetensors", "vision.safetensors"):
        assert (again / file).read_bytes() == (packed["int8"] / file).read_bytes()


@pytest.mark.parametrize(
    ("precision", "why"),
    [*((precision, "another layout") for precision in PRECISIONS), ("int8", "no kernels"), ("int4", "another type")],
)
def test_where_it_cannot_be_used_as_it_is_a_line_says_so(
    packed: Any, precision: Precision, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"no kernels": {"operators": "aten"}, "another type": {"dtype": "float16"}}.get(why, {})
    if why == "another layout":
        monkeypatch.setattr(CpuBackend, "packed_layout", lambda *_, **__: OTHER)
    captioner = opened(model=str(packed[precision]), **options)

    assert [AGAIN in note for note in captioner.info.notes].count(True) == 1
    assert captioner.caption(PICTURE).token_ids == plain_ids(precision=precision, **options)


@pytest.mark.slow
def test_the_manifest_and_doctor_name_the_form(packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library().library
    assert library is not None
    source, manifest = read_manifest(embedded_model()), read_manifest(packed["int8"])
    assert manifest["packed"]["source"] == manifest["origin"]["digest"] == source["digest"]
    assert manifest["packed"]["block"] == library.layout.block

    findings = diagnose(CaptionerSpec(model=packed["int8"], device="cpu"))
    assert {finding.level for finding in findings} == {"ok"}
    told = " ".join(finding.sentence for finding in findings)
    assert f"packed in {library.layout}" in told
    assert f"({library.instruction_set}) use its packed weights as they are" in told

    monkeypatch.setattr(
        "llama_adapter.app.command_line.doctor.model.find_library", lambda: Finding(library=None, reason="none here")
    )
    told = " ".join(finding.sentence for finding in diagnose(CaptionerSpec(model=packed["int8"], device="cpu")))
    assert "do not use its packed weights" in told
    assert "none here" in told


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block": 0}, "`packed`"),
        ({"block": 1 << 40}, "`packed`"),
        ({"version": 2}, "`packed`"),
        ({"int8_added": -1}, "`packed`"),
        ({"block": 96}, "weight_packed_int"),  # not the layout of the file
    ],
)
def test_a_layout_that_cannot_be_or_is_another_is_refused(
    packed: Any, tmp_path: Path, precision: Precision, changes: dict[str, int], named: str
) -> None:
    bundle = Path(shutil.copytree(packed[precision], tmp_path / "bundle"))
    edit(lambda manifest: manifest["packed"].update(changes))(bundle)
    with pytest.raises(CheckpointError, match=named):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"num_ranks": 2}, "`packed`"),  # no bundle is both
        ({"version": 4}, "head.weight_packed_int"),  # its head would have 4 bits
        ({"finer": {"head.weight": "int8", "norm.weight": "int8"}}, "`norm.weight` in `finer`"),
    ],
)
def test_a_manifest_that_does_not_fit_packed_weights_is_refused(
    packed: Any, tmp_path: Path, entries: dict[str, Any], words: str
) -> None:
    bundle = Path(shutil.copytree(packed["int4"], tmp_path / "bundle"))
    edit(lambda manifest: manifest.update(entries))(bundle)
    assert assemble_arrays(CaptionerSpec(model=str(bundle), device="cpu")) is None
    with pytest.raises(CheckpointError, match=words):
        load_bundle(bundle)


def test_types_without_kernels_and_the_bundle_itself_are_refused(
    packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError) as caught:
        pack_bundle(PackJob(out=str(tmp_path / "bundle"), dtype="float16"))
    assert "--dtype" in caught.value.hint
    with pytest.raises(CheckpointError, match="itself"):
        pack_bundle(PackJob(model=str(packed["int8"]), out=str(packed["int8"]), force=True))
    monkeypatch.setattr(
        "llama_adapter.app.models.packed_bundle.find_library", lambda: Finding(library=None, reason="no compiler")
    )
    with pytest.raises(DeviceError, match="no compiler"):
        pack_bundle(PackJob(out=str(tmp_path / "bundle")))
