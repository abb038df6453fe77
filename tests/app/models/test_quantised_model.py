"""8-bit bundles: what `quantize` writes, what it refuses, and that such a model answers as the one it was made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.doctor.model import diagnose
from llama_adapter.app.encoder_export.to_onnx import EncoderSources, load_encoder
from llama_adapter.app.models.bundle import convert, load_bundle, read_manifest, save_bundle
from llama_adapter.app.models.checkpoints import ModelSources, file_digest
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from tests.app.golden import model_options, picture
from tests.app.models.bundles import Damage, edit_manifest, edit_tensors, is_mapped

SAMPLES = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))


@pytest.fixture(scope="module")
def int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's. Nothing may be changed in it."""
    return quantise_bundle(QuantiseJob(out=str(tmp_path_factory.mktemp("int8") / "bundle")))


@pytest.fixture
def own_bundle(tmp_path: Path) -> Path:
    return quantise_bundle(QuantiseJob(out=str(tmp_path / "bundle")))


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_quantised_bundle_holds_what_loading_in_int8_gives(int8_bundle: Path) -> None:
    plain, stored = load_bundle(embedded_model()), load_bundle(int8_bundle)
    rounded = load_bundle(embedded_model(), precision="int8")

    assert (stored.precision, stored.dtype) == ("int8", torch.float16)
    assert same(stored.decoder_state, rounded.decoder_state)
    assert same(stored.vision_state, rounded.vision_state)
    assert stored.origin == rounded.origin
    # The encoder of the full model is recognised as that of the quantised one.
    assert stored.origin.fingerprint == fingerprint(plain.vision_state)
    for name in ("embedding.weight", "norm.weight"):
        assert torch.equal(plain.decoder_state[name], stored.decoder_state[name])
    assert torch.equal(plain.vision_state["clip.position_embedding"], stored.vision_state["clip.position_embedding"])


def test_the_manifest_names_the_original_and_a_version_that_older_programs_refuse(int8_bundle: Path) -> None:
    made, source = read_manifest(int8_bundle), read_manifest(embedded_model())
    sizes = [sum(f.stat().st_size for f in place.glob("*.safetensors")) for place in (int8_bundle, embedded_model())]

    assert (made["version"], made["precision"], made["dtype"]) == (2, "int8", "float16")
    assert made["origin"]["digest"] == source["digest"] != made["digest"]
    assert (made["name"], made["prompt"], made["sources"]) == (source["name"], source["prompt"], source["sources"])
    assert (source["version"], "precision" in source) == (1, False)
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_8_bit_weights_are_mapped_whatever_the_number_type_of_the_rest(int8_bundle: Path) -> None:
    loaded = load_bundle(int8_bundle, dtype=torch.float32)
    for state, file in ((loaded.decoder_state, "llm.safetensors"), (loaded.vision_state, "vision.safetensors")):
        stored = {name: tensor for name, tensor in state.items() if tensor.dtype == torch.int8}
        assert stored
        assert all(is_mapped(tensor, int8_bundle / file) for tensor in stored.values())
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


def test_captions_of_the_samples_are_those_of_float32(int8_bundle: Path) -> None:
    expected = Captioner.load().generate(SAMPLES)
    ours = Captioner.load(int8_bundle).generate(SAMPLES)
    at_load = Captioner.load(precision="int8").generate(SAMPLES)

    assert [answer.text for answer in ours] == [answer.text for answer in expected]
    assert [answer.token_ids for answer in at_load] == [answer.token_ids for answer in ours]


def test_precision_is_settled_when_a_captioner_is_loaded(int8_bundle: Path) -> None:
    captioners = [
        Captioner.load(),
        Captioner.load(int8_bundle),
        Captioner.load(int8_bundle, precision="float"),
        Captioner.load(precision="int8"),
    ]

    assert [one.info.precision for one in captioners] == ["float", "int8", "float", "int8"]
    assert [one.spec.precision for one in captioners] == ["float", "int8", "float", "int8"]


def test_checkpoints_in_8_bits_answer_as_their_bundle_does(tmp_path: Path) -> None:
    options = model_options("LORA-BIAS-TINY")
    full = convert(ModelSources(**options), tmp_path / "full", dtype=torch.float32)
    rounded = quantise_bundle(QuantiseJob(model=str(full), out=str(tmp_path / "int8")))

    [ours] = Captioner.load(**options, precision="int8").generate([picture()], max_new_tokens=8)
    [expected] = Captioner.load(rounded).generate([picture()], max_new_tokens=8)

    assert ours.token_ids == expected.token_ids


def test_a_bundle_of_8_bits_is_not_quantised_again(int8_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="The model embedded has 8-bit weights already"):
        quantise_bundle(QuantiseJob(model=str(int8_bundle), out=str(tmp_path / "again")))
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_never_written_over_the_one_it_is_made_from(own_bundle: Path) -> None:
    with pytest.raises(CheckpointError, match="is the bundle to quantise itself"):
        quantise_bundle(QuantiseJob(model=str(own_bundle), out=str(own_bundle), force=True))
    with pytest.raises(CheckpointError, match="exists already"):
        quantise_bundle(QuantiseJob(out=str(own_bundle)))
    assert quantise_bundle(QuantiseJob(out=str(own_bundle), force=True)) == own_bundle.resolve()


@pytest.mark.parametrize(
    ("values", "message"),
    [({"precision": "int4"}, "precision must be int8"), ({"model": ""}, "model is empty"), ({"out": ""}, "out is")],
)
def test_a_job_that_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantiseJob(**{"out": "x", **values})


def test_an_encoder_is_exported_from_full_weights_only(int8_bundle: Path) -> None:
    with pytest.raises(CheckpointError, match="has 8-bit weights"):
        load_encoder(EncoderSources(model=str(int8_bundle)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_tensors(lambda t: t["head.weight_scale"].fill_(float("nan"))), r"above 0, in `head\.weight_scale`"),
        (edit_tensors(lambda t: t["head.weight_scale"][7:].zero_()), r"above 0, in `head\.weight_scale`"),
        (edit_tensors(lambda t: t["head.weight_scale"].neg_()), r"above 0, in `head\.weight_scale`"),
        (edit_tensors(lambda t: t.pop("head.weight_scale")), r"lacks `head\.weight_scale`"),
        (
            edit_tensors(lambda t: t.update({"head.weight": t["head.weight"].half()})),
            r"`head\.weight` as float16 \[512, 192\], where int8 \[512, 192\] is wanted",
        ),
        (
            edit_tensors(lambda t: t.update({"head.weight_scale": torch.ones(3)})),
            r"`head\.weight_scale` as float32 \[3\], where float32 \[512\] is wanted",
        ),
        (edit_manifest(precision="int4"), "incomplete or wrong in `precision`"),
        (edit_manifest(version=1), "incomplete or wrong in `precision`"),
        (edit_manifest(origin=None), "incomplete or wrong in `origin`"),
        (edit_manifest(origin={"digest": 1, "fingerprint": {}}), "incomplete or wrong in `origin`"),
        (edit_manifest(origin={"digest": "x", "fingerprint": {"clip": 1}}), "incomplete or wrong in `origin`"),
    ],
)
def test_a_damaged_bundle_is_told_in_a_sentence(own_bundle: Path, damage: Damage, message: str) -> None:
    damage(own_bundle)
    with pytest.raises(CheckpointError, match=message):
        load_bundle(own_bundle)


def test_a_model_says_of_itself_what_it_was_made_from_before_it_is_saved(tmp_path: Path) -> None:
    model = load_bundle(embedded_model(), precision="int8")

    saved = load_bundle(save_bundle(tmp_path / "saved", model=model))

    assert same(saved.decoder_state, model.decoder_state)
    assert saved.origin == model.origin


def test_doctor_replays_the_known_answer_in_8_bits(int8_bundle: Path) -> None:
    findings = diagnose(int8_bundle)

    assert {finding.level for finding in findings} == {"ok"}
    sentences = {finding.what: finding.sentence for finding in findings}
    digest = read_manifest(embedded_model())["digest"][:12]
    assert f"in int8 and float16, made from the model {digest}" in sentences["manifest"]
    assert "with 8-bit weights, as it should" in sentences["known answer"]
    [full] = [found for found in diagnose(int8_bundle, precision="float") if found.what == "known answer"]
    assert "8-bit" not in full.sentence


def test_doctor_warns_where_8_bits_change_the_known_answer(own_bundle: Path) -> None:
    known = json.loads((own_bundle / "known_answer.json").read_text()) | {"text": "a blue star"}
    (own_bundle / "known_answer.json").write_text(json.dumps(known))
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    file = own_bundle / "known_answer.json"
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))

    last, widened = diagnose(own_bundle)[-1], diagnose(own_bundle, precision="float")[-1]

    assert (last.level, last.what) == ("warning", "known answer")
    assert last.sentence.startswith("With 8-bit weights the model answers 'a large red star")
    assert last.sentence.endswith("and with full ones 'a blue star'")
    assert (widened.level, widened.sentence) == (last.level, last.sentence)


def test_doctor_finds_weights_that_the_kernels_are_not_made_for(own_bundle: Path) -> None:
    edit_tensors(lambda tensors: tensors["head.weight"][3].fill_(-128))(own_bundle)

    faults = [finding.sentence for finding in diagnose(own_bundle) if finding.level == "error"]

    assert "`llm.safetensors` has 8-bit weights of -128, in `head.weight`" in faults


@pytest.mark.parametrize("operators", ["auto", "aten"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_8_bit_weights_go_with_every_number_type_and_with_plain_operators(dtype: str, operators: str) -> None:
    expected = Captioner.load().generate(SAMPLES[:4])
    ours = Captioner.load(precision="int8", dtype=dtype, operators=operators).generate(SAMPLES[:4])

    assert [answer.text for answer in ours] == [answer.text for answer in expected]
