"""`quantize --calibrate`: bundles of 4 and 8 bits, which samples and inputs count, scales of inputs, and refusals."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.command_line.main import main
from llama_adapter.app.learning.quantising import rounding, samples
from llama_adapter.app.learning.quantising.rounding import Sample, round_model
from llama_adapter.app.learning.quantising.samples import SampleSpec, collect_samples, quantise_calibrated
from llama_adapter.app.models.bundle import load_bundle, save_bundle, stream_bundle
from llama_adapter.app.models.bundle_manifest import INPUT_SCALES, read_manifest
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.packed_bundle import PackJob, pack_bundle, split_bundle
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_model
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.models.sketch import expected_forms, sketch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.app.pictures.reading.reader import PictureReader
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.runtime.devices.cuda_linear import RoundedLinear
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.int8 import INPUT_SCALE
from llama_adapter.runtime.schemes.layers import dequantise_linears
from llama_adapter.runtime.schemes.scheme import Parts, TensorForm, find_scheme
from llama_adapter.runtime.schemes.state import linear_weights
from llama_adapter.vision.encoder import encoder_from_state
from tests.app.assembled import assemble_sources
from tests.app.command import Run
from tests.app.golden import model_options
from tests.app.models.bundles import edit, edit_manifest
from tests.fakes.cuda_graphs import install_gpus
from tests.fakes.cuda_linear import LinearOps
from tests.llm.test_split import Place
from tests.llm.toys import NEEDS_KERNELS, forward

FILES = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
BROKEN = Path(embedded_model()).parent / "broken"
CALIBRATED = ("quantize", "--precision", "int4", "--calibrate")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle that the command calibrates with eight samples, asking them a sheet, and what the command says."""
    folder = tmp_path_factory.mktemp("calibrated")
    sheet = folder / "questions.csv"
    sheet.write_text("question\nHow many objects are there?\nWhat is in the picture?\n")
    words = [*CALIBRATED, *FILES[:8], str(BROKEN), "--questions", str(sheet), "--out", str(folder / "bundle")]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert (main(words), out.getvalue()) == (0, "")
    return folder / "bundle", err.getvalue()


@pytest.fixture
def in_4_bits(calibrated: tuple[Path, str]) -> Path:
    """The bundle. Tests must not change it."""
    return calibrated[0]


@pytest.mark.slow
def test_the_bundle_has_the_form_of_4_bits_and_says_how_it_was_calibrated(in_4_bits: Path) -> None:
    manifest, source = read_manifest(in_4_bits), read_manifest(embedded_model())
    stored, nearest = load_bundle(in_4_bits), load_bundle(embedded_model(), precision="int4")

    assert (manifest["version"], manifest["precision"], manifest["finer"]) == (6, "int4", {"head.weight": "int8"})
    assert manifest["origin"]["digest"] == source["digest"]
    assert manifest["origin"]["calibration_pictures"] == 8
    assert (stored.origin.calibration_pictures, nearest.origin.calibration_pictures) == (8, 0)
    for ours, theirs in ((stored.decoder_state, nearest.decoder_state), (stored.vision_state, nearest.vision_state)):
        assert {name: (one.shape, one.dtype) for name, one in ours.items()} == {
            name: (one.shape, one.dtype) for name, one in theirs.items()
        }
        quantised = [name for name, one in ours.items() if one.dtype == torch.uint8]
        assert not any(torch.equal(ours[name], theirs[name]) for name in quantised)
        plain = [name for name, one in ours.items() if name not in quantised and not name.endswith("_scale")]
        assert all(torch.equal(ours[name], theirs[name]) for name in plain)


@pytest.mark.slow
def test_it_answers_as_the_original_and_doctor_finds_it_sound(in_4_bits: Path) -> None:
    with Captioner.load(in_4_bits, dtype="float32") as ours, Captioner.load(dtype="float32") as full:
        texts = [[answer.text for answer in captioner.generate(FILES)] for captioner in (ours, full)]
    findings = {finding.what: finding for finding in diagnose(CaptionerSpec(model=in_4_bits))}

    assert sum(one == other for one, other in zip(*texts, strict=True)) >= 0.95 * len(FILES)
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert "calibrated with 8 pictures" in findings["manifest"].sentence


@pytest.mark.slow
@pytest.mark.parametrize("count", ["many", None, True])
def test_a_damaged_count_of_pictures_is_refused(in_4_bits: Path, tmp_path: Path, count: object) -> None:
    copy = Path(shutil.copytree(in_4_bits, tmp_path / "bundle"))
    edit_manifest(origin={**read_manifest(in_4_bits)["origin"], "calibration_pictures": count})(copy)

    with pytest.raises(CheckpointError, match="origin"):
        load_bundle(copy)


def test_pictures_are_asked_the_jobs_questions_in_turn() -> None:
    questions = (
        Question(),
        Question(instruction="What color is the star?"),
        Question(instruction="Is there a star?", task=OneOf(("yes", "no"))),
    )
    model = load_bundle(embedded_model())

    found = collect_samples(
        SampleSpec(pictures=tuple(FILES[:9]), questions=questions, reader="thread"),
        model=None,
        vision=model.vision_config,
    )

    decode = model.tokenizer.decode
    for index, sample in enumerate(found):
        prompt = decode(sample.token_ids[: sample.num_prompt_tokens])
        answer = decode(sample.token_ids[sample.num_prompt_tokens :])
        assert (questions[index % 3].instruction or model.prompt) in prompt
        assert answer
        assert index % 3 != 2 or answer.strip() in ("yes", "no")
    assert len(found) == 9


@pytest.mark.slow
def test_the_command_skips_what_it_cannot_read_and_asks_a_sheet(calibrated: tuple[Path, str]) -> None:
    _, said = calibrated
    assert said.count("a picture is skipped") == 3
    assert "calibrating with 8 pictures" in said
    assert "8 pictures are few" in said
    assert "MB in int4, calibrated" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*CALIBRATED, "nowhere"), "at least 8 pictures"),
        ((*CALIBRATED, str(BROKEN)), "at least 8 pictures"),
        ((*CALIBRATED, *FILES[:7]), "got 7"),
        (("quantize", "--precision", "int4", "--questions", "questions.txt"), "--calibrate"),
        ((*CALIBRATED, *FILES, "--questions", "missing.txt"), "missing.txt"),
    ],
)
def test_wrong_use_is_told_and_writes_nothing(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples.Captioner, "from_spec", lambda spec: pytest.fail("the model is loaded"))
    monkeypatch.setattr(samples, "open_reader", lambda kind, spec, pixels: PictureReader(spec, pixels=pixels))

    ran = run(*arguments, "--out", str(tmp_path / "bundle"))

    assert ran.code == 2
    assert told in ran.err
    assert list(tmp_path.iterdir()) == []


def test_more_pictures_than_fit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "MOST_PICTURES", 10)

    found = collect_samples(
        SampleSpec(pictures=tuple(FILES), reader="thread"),
        model=None,
        vision=load_bundle(embedded_model()).vision_config,
    )

    assert len(found) == 10
    assert "the first 10 pictures are used" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_calibration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, everything: int, what: str) -> None:
        if done == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(samples, "say_count", stop)
    with pytest.raises(KeyboardInterrupt):
        quantise_calibrated(
            QuantiseJob(out=str(tmp_path / "bundle"), precision="int4"),
            SampleSpec(pictures=tuple(FILES[:8]), reader="thread"),
        )
    assert list(tmp_path.iterdir()) == []


SAMPLES = SampleSpec(pictures=tuple(FILES[:8]), reader="thread")
QUESTION, CHOICES = "What color is the shape?", ["red", "blue", "yellow", "green"]


@pytest.fixture(scope="module")
def in_8_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in 8 bits, calibrated with eight of its samples. Tests must not change it."""
    out = str(tmp_path_factory.mktemp("calibrated") / "bundle")
    return quantise_calibrated(QuantiseJob(out=out, precision="int8"), SAMPLES)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def scores(model: Path, **options: Any) -> list[float]:
    """Probabilities of choices about pictures that were not calibrated with."""
    with Captioner.load(model, device="cpu", dtype="float32", **options) as captioner:
        answers = captioner.generate(FILES[8:12], QUESTION, choices=CHOICES)
        return [share for answer in answers for share in (answer.choice or {}).values()]


def test_the_weights_are_those_without_calibration_and_each_layer_of_the_decoder_has_a_scale(in_8_bits: Path) -> None:
    stored, nearest = load_bundle(in_8_bits), load_bundle(embedded_model(), precision="int8")
    manifest = read_manifest(in_8_bits)

    assert same(stored.decoder_state, nearest.decoder_state)
    assert same(stored.vision_state, nearest.vision_state)
    assert stored.input_scales.keys() == linear_weights(sketch(stored.decoder_config))
    assert all(scale.shape == (1,) and 0 < float(scale) < 100 for scale in stored.input_scales.values())
    assert manifest["files"][INPUT_SCALES]["bytes"] == (in_8_bits / INPUT_SCALES).stat().st_size
    assert manifest["origin"]["calibration_pictures"] == 8
    assert {finding.level for finding in diagnose(CaptionerSpec(model=in_8_bits))} == {"ok"}
    assert load_bundle(in_8_bits, precision="float").input_scales == {}


@torch.inference_mode()
def test_a_scale_is_the_largest_input_of_any_sample(in_8_bits: Path) -> None:
    stored = load_bundle(in_8_bits, dtype=torch.float32)
    encoder = encoder_from_state(stored.vision_config, stored.vision_state)
    decoder = decoder_from_state(stored.decoder_config, stored.decoder_state)
    dequantise_linears(encoder)
    dequantise_linears(decoder)
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def look(layer: object, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

        return look

    for name in ("layers.0.attention.qkv", "layers.1.attention.qkv", "layers.3.feed_forward.down", "head"):
        decoder.get_submodule(name).register_forward_pre_hook(watch(f"{name}.weight"))
    for sample in collect_samples(SAMPLES, model=None, vision=stored.vision_config):
        prefix = decoder.project_prefix(encoder(torch.from_numpy(sample.pixels)[None]))
        hidden = forward(decoder, torch.tensor([sample.token_ids]), prefix)
        decoder.logits(hidden[0, sample.num_prompt_tokens - 1 :])

    assert len(largest) == 4
    for name, value in largest.items():
        assert float(stored.input_scales[name]) * 127 == pytest.approx(value, rel=0.01), name  # its prefix is of floats


@NEEDS_KERNELS
def test_operators_w8a8_use_the_scales_and_no_others(in_8_bits: Path, tmp_path: Path) -> None:
    packed = pack_bundle(PackJob(model=str(in_8_bits), out=str(tmp_path / "packed"), dtype="float32"))
    static, dynamic = scores(in_8_bits, operators="w8a8"), scores(in_8_bits)

    assert scores(embedded_model(), precision="int8", operators="w8a8") == dynamic
    assert static != dynamic
    assert static == pytest.approx(dynamic, abs=0.1)
    assert scores(packed, operators="w8a8") == static
    assert scores(packed) == dynamic


def test_bundles_made_from_it_keep_the_scales(in_8_bits: Path, tmp_path: Path) -> None:
    model, tensors = stream_bundle(in_8_bits)
    copy = save_bundle(tmp_path / "copy", model=model, decoder_tensors=tensors)
    split = split_bundle(in_8_bits, tmp_path / "split", num_ranks=2)
    scales = dict(model.input_scales)

    for made in (copy, split):
        assert same(load_file(made / INPUT_SCALES), scales)
    for made, operators in product((in_8_bits, split), ("w8a8", "auto")):  # each rank has those of whole layers
        spec = CaptionerSpec(model=str(made), device="cpu", precision="int8", operators=operators)
        of_rank = dict(stream_model(spec, dtype=torch.float32, ranks=Place(1, 2))[1])
        found = {name.removesuffix(INPUT_SCALE): one for name, one in of_rank.items() if name.endswith(INPUT_SCALE)}
        assert same(found, scales if operators == "w8a8" else {})
        assert of_rank["layers.0.attention.out.weight"].shape[1] == model.decoder_config.dim // 2
    edit(lambda manifest: manifest["files"].pop(INPUT_SCALES))(copy)
    assert load_bundle(copy).input_scales == {}
    assert "digest" in "".join(
        finding.sentence for finding in diagnose(CaptionerSpec(model=copy)) if finding.level == "error"
    )


@pytest.mark.slow
def test_a_gpu_rounds_the_decoders_inputs_by_the_scales(in_8_bits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(monkeypatch)
    LinearOps().install(monkeypatch)
    options: dict[str, Any] = {"device": "cuda:0", "dtype": "bfloat16", "mode": "eager", "operators": "w8a8"}

    static, dynamic = Captioner.load(in_8_bits, **options), Captioner.load(precision="int8", **options)

    def scale(captioner: Captioner) -> Tensor | None:
        head = captioner._engine._runner._decoder.head
        assert type(head) is RoundedLinear
        return head.input_scale

    assert torch.equal(scale(static), load_bundle(in_8_bits).input_scales["head.weight"])
    assert scale(dynamic) is None
    encoders = [captioner._vision.module.modules() for captioner in (static, dynamic)]
    rounded = [layer for layers in encoders for layer in layers if isinstance(layer, RoundedLinear)]
    assert [layer.input_scale for layer in rounded] == [None] * len(rounded) != []
    texts = [[answer.text for answer in one.generate(FILES[8:16])] for one in (static, dynamic)]
    assert texts[0] == texts[1]


FIRST, LATER, HEAD = "layers.0.attention.qkv.weight", "layers.9.attention.qkv.weight", "head.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({FIRST: None, LATER: torch.ones(1)}, "lacks .*layers.0.*layers.9"),
        ({HEAD: None}, "lacks .*head.weight"),
        *(({HEAD: torch.tensor([wrong])}, "above 0, in .*head.weight") for wrong in (0.0, -0.1, torch.inf, torch.nan)),
        *(({HEAD: wrong}, "head.weight.*where") for wrong in (torch.ones(2), torch.ones(1).half())),
    ],
)
def test_damaged_scales_are_refused(
    in_8_bits: Path, tmp_path: Path, changes: dict[str, Tensor | None], words: str
) -> None:
    copy = Path(shutil.copytree(in_8_bits, tmp_path / "bundle"))
    scales = load_file(copy / INPUT_SCALES) | changes
    save_file({name: scale for name, scale in scales.items() if scale is not None}, copy / INPUT_SCALES)
    size = (copy / INPUT_SCALES).stat().st_size
    edit(lambda manifest: manifest["files"][INPUT_SCALES].update(bytes=size))(copy)

    with pytest.raises(CheckpointError, match=words) as caught:
        load_bundle(copy)

    assert "write it again" in (caught.value.hint or "")


def test_scales_that_miss_a_layer_are_not_written(in_8_bits: Path, tmp_path: Path) -> None:
    model, tensors = stream_bundle(in_8_bits)
    scales = dict(model.input_scales)
    del scales["head.weight"]

    with pytest.raises(ValueError, match=r"head\.weight"):
        save_bundle(tmp_path / "copy", model=dataclasses.replace(model, input_scales=scales), decoder_tensors=tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_bundle(embedded_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def all_samples(model: LoadedModel) -> list[Sample]:
    return collect_samples(SampleSpec(pictures=tuple(FILES), reader="thread"), model=None, vision=model.vision_config)


def rounded(model: LoadedModel, samples: Sequence[Sample]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    quantised, tensors = round_model(model, samples, dtype=torch.float32, precision="int4")
    return dict(quantised.vision_state), dict(tensors)


@torch.inference_mode()
def outputs(
    model: LoadedModel, vision_state: dict[str, Tensor], decoder_state: dict[str, Tensor], samples: Sequence[Sample]
) -> tuple[Tensor, Tensor]:
    """The samples' visual queries, and the logits at their last tokens."""
    encoder = encoder_from_state(model.vision_config, vision_state)
    decoder = decoder_from_state(model.decoder_config, decoder_state)
    for half in (encoder, decoder):
        dequantise_linears(half)
    visual_queries = encoder(torch.from_numpy(np.stack([sample.pixels for sample in samples])))
    logits = []
    for sample, visual_query in zip(samples, visual_queries, strict=True):
        prefix = decoder.project_prefix(visual_query[None])
        hidden = forward(decoder, torch.tensor([sample.token_ids]), prefix)
        logits.append(decoder.logits(hidden[0, sample.num_prompt_tokens - 1 :]))
    return visual_queries, torch.cat(logits)


@pytest.mark.slow
def test_outputs_about_other_pictures_are_closer_than_with_nearest_rounding(
    model: LoadedModel, all_samples: list[Sample]
) -> None:
    known, others = all_samples[:22], all_samples[22:]
    nearest, tensors = quantise_model(model, model.decoder_state.items(), dtype=torch.float32, precision="int4")
    expected = outputs(model, dict(model.vision_state), model.decoder_state, others)

    by_nearest = outputs(model, dict(nearest.vision_state), dict(tensors), others)
    calibrated = outputs(model, *rounded(model, known), others)

    for what, ours, theirs, wanted in zip(("visual query", "logits"), calibrated, by_nearest, expected, strict=True):
        assert float((ours - wanted).norm()) < 0.7 * float((theirs - wanted).norm()), what


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])  # LORA: the adapter has its own layers
def test_every_linear_layer_of_a_model_is_rounded(adapter: str) -> None:
    model = assemble_sources(CaptionerSpec(**model_options(adapter)))
    side, rng = model.vision_config.clip.image_size, np.random.default_rng(0)
    drawn = [
        Sample(pixels=rng.integers(0, 256, (side, side, 3), dtype=np.uint8), token_ids=(1, *ids), num_prompt_tokens=3)
        for ids in rng.integers(3, 100, (8, 6)).tolist()
    ]
    seen: list[tuple[int, int]] = []

    vision, tensors = round_model(
        model, drawn, dtype=torch.float32, precision="int4", progress=lambda done, all: seen.append((done, all))
    )

    for config, state in ((model.vision_config, vision.vision_state), (model.decoder_config, dict(tensors))):
        forms = expected_forms(config, dtype=torch.float32, precision="int4")
        assert {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()} == forms
    assert seen == [(number + 1, len(seen)) for number in range(len(seen))]
    assert vision.origin.calibration_pictures == 8


def hessians(model: LoadedModel, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The Hessians of the decoder's linear layers, named by layer number and name, such as "0.down"."""
    scheme, found = find_scheme("int4"), []

    def calibrate(weight: Tensor, hessian: Tensor) -> Parts:
        found.append(hessian.clone())
        return scheme.quantise(weight)

    spy = dataclasses.replace(scheme, calibrate=calibrate)
    monkeypatch.setattr(rounding, "find_scheme", lambda precision: spy)
    rounded(model, samples)
    num_decoders = 4 * model.decoder_config.num_layers + 1
    names = [f"{layer}.{name}" for layer in range(4) for name in ("qkv", "out", "gate_up", "down")] + ["head"]
    assert len(names) == num_decoders
    return dict(zip(names, found[-num_decoders:], strict=True))


def test_padding_does_not_count(model: LoadedModel, all_samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    by_length = sorted(all_samples, key=lambda sample: len(sample.token_ids))
    short, long = by_length[0], by_length[-1]
    assert len(short.token_ids) < len(long.token_ids)

    alone = [hessians(model, [sample], monkeypatch) for sample in (short, long)]
    together = hessians(model, [short, long], monkeypatch)

    for name in ("0.qkv", "0.out", "0.down", "2.qkv", "3.down", "head"):
        # A Hessian is a sum over tokens, so one more would add about a token's share to it. Rounding adds far less.
        share = float(alone[0][name].trace()) / len(short.token_ids)
        assert float((together[name] - alone[0][name] - alone[1][name]).norm()) < 0.01 * share, name


def test_the_adapters_tokens_count_in_the_layers_that_project_them(
    model: LoadedModel, all_samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = all_samples[0]
    other = dataclasses.replace(one, pixels=all_samples[1].pixels)

    first, second = (hessians(model, [sample], monkeypatch) for sample in (one, other))

    # Layer 1 is the first with an adapter. Its text tokens do not depend on the picture yet; the adapter's tokens do.
    assert model.decoder_config.first_adapter_layer == 1
    torch.testing.assert_close(first["0.down"], second["0.down"])
    assert float((first["1.qkv"] - second["1.qkv"]).norm()) > 0.01 * float(first["1.qkv"].norm())


def test_quantised_models_and_damaged_weights_are_refused(model: LoadedModel, all_samples: list[Sample]) -> None:
    quantised = load_bundle(embedded_model(), precision="int8")
    damaged = dict(model.decoder_state)
    damaged["layers.2.feed_forward.down.weight"] = damaged["layers.2.feed_forward.down.weight"] * float("nan")

    with pytest.raises(CheckpointError, match="already"):
        rounded(quantised, all_samples[:8])
    with pytest.raises(CheckpointError, match=r"layers\.2\.feed_forward\.down"):
        rounded(dataclasses.replace(model, decoder_state=damaged), all_samples[:8])
