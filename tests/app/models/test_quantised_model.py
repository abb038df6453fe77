"""8-bit and 4-bit bundles: what `quantize` writes and refuses, and that such models answer like the original."""

import itertools
import json
import operator
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.captioning.assemble_arrays import assemble_arrays
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.bundle import load_bundle, save_bundle, stream_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.graph_export.to_onnx import load_encoder
from llama_adapter.app.models.packed_bundle import split_bundle
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle, quantise_model
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.schemes import QUANTISED, Precision
from tests.app.models.bundles import (
    Damage,
    assert_same,
    assert_same_weights,
    edit_known_answer,
    edit_manifest,
    edit_tensors,
    older_int4,
    refusals,
)
from tests.llm.test_sources_of_families import made
from tests.llm.test_split import Place
from tests.llm.toys import GOLDEN, is_mapped

HEAD_IN_8_BITS = {"head.weight": "int8"}
SAMPLES = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))


@pytest.fixture
def int8_bundle(embedded: Callable[[Precision], Path]) -> Path:
    return embedded("int8")


@pytest.fixture(params=QUANTISED)
def quantised(request: pytest.FixtureRequest, embedded: Callable[[Precision], Path]) -> tuple[Precision, Path]:
    """A precision, and the embedded model's bundle with this precision."""
    return request.param, embedded(request.param)


@pytest.fixture
def own_bundle(tmp_path: Path, int8_bundle: Path) -> Path:
    return Path(shutil.copytree(int8_bundle, tmp_path / "bundle"))


def test_a_quantised_bundle_equals_quantising_at_load(quantised: tuple[Any, Path], tmp_path: Path) -> None:
    precision, bundle = quantised
    plain, stored = load_bundle(embedded_model()), load_bundle(bundle)
    rounded = load_bundle(embedded_model(), precision=precision)

    assert (stored.precision, stored.dtype) == (precision, torch.float16)
    saved = load_bundle(save_bundle(tmp_path / "saved", model=rounded))
    for one in (stored, saved):
        assert_same_weights(one, rounded)
        assert one.origin == rounded.origin
    # The encoder of the full model is accepted as the quantised model's encoder.
    assert stored.origin.fingerprint == fingerprint(plain.vision_state)
    for name in ("embedding.weight", "norm.weight"):
        assert torch.equal(plain.decoder_state[name], stored.decoder_state[name])
    assert torch.equal(plain.vision_state["clip.position_embedding"], stored.vision_state["clip.position_embedding"])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of transformers
def test_an_embedding_is_scaled_in_the_numbers_of_the_computation(tmp_path: Path) -> None:
    folder, out = str(tmp_path / "gemma3"), str(tmp_path / "out")
    base = made("gemma3", vocab_size=512)
    base.to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(GOLDEN / "LLaMA" / "tokenizer.model", folder)

    _, tensors = stream_model(CaptionerSpec(llama_dir=folder, precision="int8"), dtype=torch.bfloat16)
    stored = load_bundle(quantise_bundle(QuantiseJob(model=folder, out=out, precision="int8"))).decoder_state

    # As in transformers, the root of the width is rounded first.
    for dtype, state in ((torch.bfloat16, dict(tensors)), (torch.float16, stored)):
        scale = torch.tensor(base.config.hidden_size**0.5, dtype=dtype).float()
        wanted = base.get_input_embeddings().weight.float() * scale
        assert torch.equal(state["embedding.weight"], wanted.to(dtype))
        assert state["layers.0.attention.out.weight"].dtype == torch.int8


def test_the_head_has_8_bits_beside_layers_of_4(embedded: Callable[[Precision], Path], tmp_path: Path) -> None:
    bundles = {precision: embedded(precision) for precision in QUANTISED}
    state, in_8_bits = (load_bundle(bundles[precision]).decoder_state for precision in ("int4", "int8"))

    for name in ("head.weight", "head.weight_scale"):
        assert torch.equal(state[name], in_8_bits[name])
        assert state[name].dtype == in_8_bits[name].dtype
    narrow = {name for name, tensor in state.items() if tensor.dtype == torch.uint8}
    assert narrow | {"head.weight"} == {name for name, tensor in in_8_bits.items() if tensor.dtype == torch.int8}
    assert {precision: read_manifest(bundle).get("finer") for precision, bundle in bundles.items()} == {
        "int8": None,
        "int4": HEAD_IN_8_BITS,
    }
    halves = split_bundle(bundles["int4"], tmp_path / "halves", num_ranks=2)
    manifest = read_manifest(halves)
    assert (manifest["version"], manifest["finer"], manifest.num_ranks) == (6, HEAD_IN_8_BITS, 2)
    heads = [dict(stream_bundle(halves, ranks=Place(rank, 2))[1])["head.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(heads), state["head.weight"])


@pytest.mark.parametrize(("stored", "wanted"), [("int8", "int4"), ("int4", "int8")])
def test_a_head_that_is_stored_as_it_is_wanted_is_not_rounded_again(
    embedded: Callable[[Precision], Path], stored: Precision, wanted: Precision
) -> None:
    bundle = embedded(stored)
    model, as_stored = load_bundle(bundle, dtype=torch.bfloat16, precision=wanted), load_bundle(bundle)

    assert model.finer_weights == (HEAD_IN_8_BITS if wanted == "int4" else {})
    assert model.decoder_state.keys() == load_bundle(embedded(wanted)).decoder_state.keys()
    for name in ("head.weight", "head.weight_scale"):
        assert torch.equal(model.decoder_state[name], as_stored.decoder_state[name])
        shares = [dict(stream_bundle(bundle, precision=wanted, ranks=Place(rank, 2))[1])[name] for rank in range(2)]
        assert torch.equal(torch.cat(shares), as_stored.decoder_state[name])


def test_an_older_bundle_keeps_its_bits_and_so_do_its_copies(tmp_path: Path) -> None:
    older = older_int4(tmp_path / "older")
    stored = load_file(older / "llm.safetensors")
    model = load_bundle(older)
    halves = split_bundle(older, tmp_path / "halves", num_ranks=2)

    assert stored["head.weight"].dtype == torch.uint8
    assert_same(model.decoder_state, stored)
    assert_same(load_bundle(save_bundle(tmp_path / "saved", model=model)).decoder_state, stored)
    heads = [dict(stream_bundle(halves, ranks=Place(rank, 2))[1])["head.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(heads), stored["head.weight"])
    assert load_bundle(older, precision="int8").decoder_state["head.weight"].dtype == torch.int8
    floats = load_bundle(older, precision="float")
    again, _ = quantise_model(floats, floats.decoder_state.items(), dtype=torch.float16, precision="int4")
    assert (model.finer_weights, again.finer_weights) == ({}, HEAD_IN_8_BITS)


@pytest.mark.parametrize(
    ("is_older", "entries", "words"),
    [
        (False, {"finer": {"head.weight": "int4"}}, "wrong in `finer`"),
        (False, {"finer": {"head.weight": "float"}}, "wrong in `finer`"),
        (False, {"finer": {"head.weight": 8}}, "wrong in `finer`"),
        (False, {"finer": {}}, "wrong in `finer`"),
        (False, {"finer": "int8"}, "wrong in `finer`"),
        (False, {"finer": HEAD_IN_8_BITS | {"norm.weight": "int8"}}, "`norm.weight` in `finer`"),
        (False, {"finer": HEAD_IN_8_BITS | {"clip.projection.weight": "int8"}}, "`clip.projection.weight` as uint8"),
        (False, {"precision": "int8"}, "wrong in `finer`"),
        (False, {"precision": ["int4"]}, "wrong in `precision`"),
        (False, {"version": 4, "precision": ["int4"]}, "wrong in `precision`"),
        (False, {"num_ranks": 1}, "wrong in `num_ranks`"),
        (False, {"packed": {}}, "wrong in `packed`"),
        (False, {"finer": {"norm.weight": "int8"}}, "`head.weight` as int8"),
        (False, {"version": 3}, "`head.weight` as int8"),
        (True, {"version": 6, "finer": HEAD_IN_8_BITS}, "`head.weight` as uint8"),
    ],
)
def test_a_manifest_that_does_not_fit_the_head_is_refused(
    embedded: Callable[[Precision], Path], tmp_path: Path, is_older: bool, entries: dict[str, Any], words: str
) -> None:
    place = tmp_path / "bundle"
    bundle = older_int4(place) if is_older else Path(shutil.copytree(embedded("int4"), place))
    assert read_manifest(bundle)["version"] == (3 if is_older else 6)
    edit_manifest(**entries)(bundle)
    assert assemble_arrays(CaptionerSpec(model=str(bundle), device="cpu")) is None
    with pytest.raises(CheckpointError, match=words):
        load_bundle(bundle)


def test_the_manifest_has_the_original_and_a_new_version(quantised: tuple[str, Path]) -> None:
    precision, bundle = quantised
    made, source = read_manifest(bundle), read_manifest(embedded_model())
    sizes = [sum(f.stat().st_size for f in place.glob("*.safetensors")) for place in (bundle, embedded_model())]

    version, share = {"int8": (2, 0.6), "int4": (6, 0.4)}[precision]
    assert (made["version"], made["precision"], made["dtype"]) == (version, precision, "float16")
    assert made["origin"]["digest"] == source["digest"] != made["digest"]
    assert (made["name"], made["prompt"], made["sources"]) == (source["name"], source["prompt"], source["sources"])
    assert (source["version"], "precision" in source) == (1, False)
    assert sizes[0] < share * sizes[1]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_quantised_weights_are_mapped_for_every_dtype(quantised: tuple[str, Path]) -> None:
    _, bundle = quantised
    loaded = load_bundle(bundle, dtype=torch.float32)
    for state, file in ((loaded.decoder_state, "llm.safetensors"), (loaded.vision_state, "vision.safetensors")):
        stored = {name: tensor for name, tensor in state.items() if tensor.dtype in (torch.int8, torch.uint8)}
        assert stored
        assert all(is_mapped(tensor, bundle / file) for tensor in stored.values())
        assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in state.values())


def test_loaded_in_float_all_weights_are_floats_again(int8_bundle: Path) -> None:
    restored = load_bundle(int8_bundle, dtype=torch.float32, precision="float")
    plain = load_bundle(embedded_model(), dtype=torch.float32)

    assert restored.precision == "float"
    assert restored.decoder_state.keys() == plain.decoder_state.keys()
    assert {tensor.dtype for tensor in restored.decoder_state.values()} == {torch.float32}
    for name, tensor in plain.decoder_state.items():
        error = (restored.decoder_state[name] - tensor).abs().max()
        assert error <= tensor.abs().max() / 127 * 0.5001, name


@pytest.mark.slow
@pytest.mark.proves("int8 weights", "CPU")
def test_captions_of_the_samples_are_those_of_float32(int8_bundle: Path) -> None:
    full, stored, at_load = Captioner.load(), Captioner.load(int8_bundle), Captioner.load(precision="int8")
    captioners = (full, stored, at_load, Captioner.load(int8_bundle, precision="float"))
    assert [one.info.precision for one in captioners] == ["float", "int8", "int8", "float"]
    assert [one.spec.precision for one in captioners] == ["float", "int8", "int8", "float"]

    expected, ours = full.generate(SAMPLES), stored.generate(SAMPLES)
    assert [answer.text for answer in ours] == [answer.text for answer in expected]
    for dtype, operators in itertools.product(("bfloat16", "float16"), ("auto", "aten")):
        few = Captioner.load(precision="int8", dtype=dtype, operators=operators).generate(SAMPLES[:4])
        assert [answer.text for answer in few] == [answer.text for answer in expected[:4]], (dtype, operators)


@pytest.mark.slow
@pytest.mark.proves("int4 weights", "CPU")
def test_most_captions_of_the_samples_survive_4_bits(embedded: Callable[[Precision], Path]) -> None:
    expected = [answer.text for answer in Captioner.load(dtype="float32").generate(SAMPLES)]
    stored = Captioner.load(embedded("int4"), dtype="float32")

    texts = [answer.text for answer in stored.generate(SAMPLES)]

    assert stored.info.precision == "int4"
    assert sum(map(operator.eq, texts, expected)) >= 0.9 * len(SAMPLES)


def test_only_float_bundles_are_quantised_and_no_bundle_is_replaced_without_force(
    int8_bundle: Path, own_bundle: Path, tmp_path: Path
) -> None:
    for job in (
        QuantiseJob(model=str(int8_bundle), out=str(tmp_path / "again")),
        QuantiseJob(model=str(own_bundle), out=str(own_bundle), force=True),  # would overwrite its own source
        QuantiseJob(out=str(own_bundle)),
    ):
        with pytest.raises(CheckpointError):
            quantise_bundle(job)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    for values in ({"precision": "int2"}, {"model": ""}, {"out": ""}):
        with pytest.raises(ValueError, match=next(iter(values))):
            QuantiseJob(**{"out": "x", **values})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):  # an encoder is exported from full weights only
        load_encoder(EncoderSources(model=str(int8_bundle)))
    assert quantise_bundle(QuantiseJob(out=str(own_bundle), force=True)) == own_bundle.resolve()


DAMAGED: tuple[Damage, ...] = (
    edit_tensors(lambda t: t["head.weight_scale"].fill_(float("nan"))),
    edit_tensors(lambda t: t["head.weight_scale"][7:].zero_()),
    edit_tensors(lambda t: t["head.weight_scale"].neg_()),
    edit_tensors(lambda t: t.pop("head.weight_scale")),
    edit_tensors(lambda t: t.update({"head.weight": t["head.weight"].half()})),
    edit_tensors(lambda t: t.update({"head.weight_scale": torch.ones(3)})),
    edit_manifest(precision="int4"),
    edit_manifest(version=1),
    edit_manifest(origin=None),
    edit_manifest(origin={"digest": 1, "fingerprint": {}}),
    edit_manifest(origin={"digest": "x", "fingerprint": {"clip": 1}}),
)


def test_a_damaged_bundle_is_refused(int8_bundle: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert refusals(int8_bundle, tmp_path, DAMAGED) == snapshot


@pytest.mark.slow
def test_doctor_replays_the_known_answer_in_8_bits(own_bundle: Path) -> None:
    findings = {finding.what: finding for finding in diagnose(CaptionerSpec(model=own_bundle))}
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert read_manifest(embedded_model())["digest"][:12] in findings["manifest"].sentence
    assert "8-bit" in findings["known answer"].sentence
    assert "8-bit" not in diagnose(CaptionerSpec(model=own_bundle, precision="float"))[-1].sentence

    known = json.loads((own_bundle / "known_answer.json").read_text())
    edit_known_answer(own_bundle, **{**known, "text": "a blue star"})
    for precision in ("int8", "float"):
        last = diagnose(CaptionerSpec(model=own_bundle, precision=precision))[-1]
        assert (last.level, last.what) == ("warning", "known answer")
        assert "'a large red star" in last.sentence
        assert "'a blue star'" in last.sentence
