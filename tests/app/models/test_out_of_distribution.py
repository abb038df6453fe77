"""Out-of-distribution detection: its mathematics, its file, and how it gets from a bundle into an answer."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from llama_adapter import Captioner
from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture, EncodedPictures
from llama_adapter.app.models.bundle import add_familiarity, load_bundle, save_bundle
from llama_adapter.app.models.bundle_manifest import FAMILIAR, read_manifest
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.prefix import Prefix
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.vision.backends.base import as_array
from llama_adapter.vision.out_of_distribution import Floats, OodDetector, read_familiarity
from scripts.train_embedded.familiar import fit_queries
from tests.app.command import Run
from tests.bounds import unit

QUERIES, WIDTH = 3, 12


def familiar(seed: int, count: int = 400) -> Floats:
    """Visual queries that vary in four directions each, except the last, which does not vary.

    All have a little noise.
    """
    bases = np.random.default_rng(0).standard_normal((QUERIES, 4, WIDTH))
    bases[-1] = 0
    rng = np.random.default_rng(seed)
    along = rng.standard_normal((count, QUERIES, 4))
    noise = 0.01 * rng.standard_normal((count, QUERIES, WIDTH))
    return (1 + np.einsum("bqk,qkd->bqd", along, bases) + noise).astype(np.float32)


@pytest.fixture(scope="module")
def fitted() -> OodDetector:
    found = fit_queries(familiar(1))
    return dataclasses.replace(found, threshold=float(np.quantile(found.distances(familiar(2)), 0.99)))


def fitted_to(model: LoadedModel, *, threshold: float) -> OodDetector:
    config = model.decoder_config
    queries = np.random.default_rng(3).standard_normal((40, config.num_queries, config.dim)).astype(np.float32)
    return dataclasses.replace(fit_queries(queries), threshold=threshold)


def bundle_with(tmp_path: Path, model: LoadedModel, *, threshold: float) -> Path:
    bundle = save_bundle(tmp_path / "bundle", model=model)
    add_familiarity(bundle, fitted_to(model, threshold=threshold))
    return bundle


def test_the_distance_is_that_of_mahalanobis_with_a_least_variance(fitted: OodDetector) -> None:
    own, asked = familiar(1).astype(np.float64), familiar(4, count=5)
    wanted, limit = np.zeros(5), np.zeros(5)
    for query in range(QUERIES):
        values, vectors = np.linalg.eigh(np.cov(own[:, query], rowvar=False))
        offsets = (asked[:, query] - own[:, query].mean(0)) @ vectors
        wanted += (offsets**2 / np.maximum(values, fitted.least_variance)).sum(1)
        # The detector computes offsets in float32, and adds those along a direction to the sum and subtracts them.
        error = unit(torch.float32) * WIDTH**0.5 * np.abs(asked[:, query]).max(1, keepdims=True)
        limit += ((2 * np.abs(offsets) + error) * error / fitted.least_variance).sum(1)

    assert (np.abs(fitted.distances(asked) - wanted) <= limit).all()
    assert fitted.variances_QK.shape == (QUERIES, 4), "only directions above the least variance are kept"


def test_what_leaves_the_usual_in_one_query_is_unfamiliar(fitted: OodDetector) -> None:
    assert np.mean(fitted.unfamiliar(familiar(5, count=1000))) < 0.03
    for query in range(QUERIES):
        others = familiar(6, count=50)
        others[:, query] += 3 * np.random.default_rng(7).standard_normal((50, WIDTH)).astype(np.float32)
        assert np.mean(fitted.unfamiliar(others)) > 0.9, query
    own = familiar(8, count=3)
    own[1, 0, 0] = np.nan
    assert fitted.unfamiliar(own) == [False, True, False]


def test_invalid_data_is_refused(fitted: OodDetector) -> None:
    for refused in (
        lambda: fit_queries(familiar(1, count=1)),
        lambda: fit_queries(np.ones((5, QUERIES, WIDTH), dtype=np.float32)),
        lambda: fitted.distances(familiar(1)[..., :5]),
    ):
        with pytest.raises(ValueError, match=r"pictures|alike|\(3, 12\)"):
            refused()


def test_a_saved_detector_gives_the_same_distances(fitted: OodDetector, tmp_path: Path) -> None:
    fitted.save(tmp_path / FAMILIAR)
    again = read_familiarity(tmp_path / FAMILIAR, num_queries=QUERIES, width=WIDTH)

    assert np.array_equal(again.distances(familiar(9)), fitted.distances(familiar(9)))
    assert again.threshold == pytest.approx(fitted.threshold, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mean", torch.ones(2, WIDTH)),
        ("directions", torch.ones(QUERIES, 4, 2)),
        ("variances", torch.zeros(QUERIES, 4)),
        ("variances", torch.ones(1, 4)),
        ("variances", torch.ones(())),
        ("threshold", torch.full((1,), torch.nan)),
        ("threshold", torch.full((1,), -3.0)),
        ("threshold", torch.ones(1, dtype=torch.float64)),
        ("more", torch.ones(1)),
    ],
)
def test_a_damaged_file_is_refused(fitted: OodDetector, tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    fitted.save(tmp_path / FAMILIAR)
    save_file({**load_file(tmp_path / FAMILIAR), name: tensor}, tmp_path / FAMILIAR)

    with pytest.raises(CheckpointError):
        read_familiarity(tmp_path / FAMILIAR, num_queries=QUERIES, width=WIDTH)


def test_a_bundle_with_statistics_is_the_same_model(tmp_path: Path, model: LoadedModel, saved: Path) -> None:
    bundle = bundle_with(tmp_path, model, threshold=7.0)
    entry = read_manifest(bundle)["files"][FAMILIAR]

    assert load_bundle(saved).ood_detector is None
    loaded = load_bundle(bundle)
    assert loaded.ood_detector is not None
    assert loaded.ood_detector.threshold == 7.0
    assert (bundle / FAMILIAR).stat().st_mode == (bundle / "tokenizer.model").stat().st_mode
    assert entry["sha256"] == hashlib.sha256((bundle / FAMILIAR).read_bytes()).hexdigest()
    assert loaded.digest == load_bundle(saved).digest, "answers are the same, so earlier records stay valid"
    again = save_bundle(tmp_path / "again", model=loaded)
    rounded = quantise_bundle(QuantiseJob(model=str(bundle), out=str(tmp_path / "int8")))
    assert load_bundle(rounded).ood_detector is not None
    for copy in (again, rounded):
        assert (copy / FAMILIAR).read_bytes() == (bundle / FAMILIAR).read_bytes()
    add_familiarity(bundle, fit_queries(familiar(1)))
    with pytest.raises(CheckpointError):  # of another model
        load_bundle(bundle)


def test_answers_are_the_same_with_a_mark_of_their_own_picture(tmp_path: Path, model: LoadedModel, saved: Path) -> None:
    bundle = bundle_with(tmp_path, model, threshold=0.0)
    vision = assemble_parts(CaptionerSpec(model=str(bundle))).vision
    size = vision.pixels.image_size
    images = [Image.new("RGB", (size, size), tone) for tone in ("black", "white")]
    ood_detector = fitted_to(model, threshold=0.0)
    distances = ood_detector.distances(as_array(vision.encode(np.stack([np.array(image) for image in images]))))
    near, far = (images[index] for index in np.argsort(distances))
    add_familiarity(bundle, dataclasses.replace(ood_detector, threshold=float(distances.mean())))

    answers, wanted = (Captioner.load(each, batch_size=2).generate([far, near, far]) for each in (bundle, saved))
    assert [answer.unfamiliar for answer in answers] == [True, False, True]
    assert [answer.unfamiliar for answer in wanted] == [None] * 3

    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]


def test_the_mark_is_kept_with_the_encoded_picture() -> None:
    kept = EncodedPictures(max_bytes=10_000)
    prefix = Prefix(torch.ones(1, 1, 2, 2, 2), torch.ones(1, 1, 2, 2, 2))
    kept.keep("a", EncodedPicture(prefix, find_unfamiliar=lambda: True))
    found = kept.find("a")

    assert found is not None
    assert found.find_unfamiliar is not None
    assert found.find_unfamiliar()


def test_an_encoder_in_four_bits_cannot_tell(run: Run, tmp_path: Path, model: LoadedModel) -> None:
    """Rounding moves its visual queries: all pictures would be called unfamiliar. What encodes a picture decides."""
    bundle = bundle_with(tmp_path, model, threshold=0.0)
    rounded = quantise_bundle(QuantiseJob(model=str(bundle), out=str(tmp_path / "rounded"), precision="int4"))
    image, onnx, picture = Image.new("RGB", (64, 64)), str(tmp_path / "encoder.onnx"), str(tmp_path / "picture.png")
    image.save(picture)
    floats, bits, both, decoder = (str(tmp_path / name) for name in ("floats", "bits", "both", "decoder"))
    whole, rough = ["--model", str(bundle)], ["--model", str(rounded)]
    for command in (
        ["export", "decoder", *rough, "--out", decoder],
        ["export", "onnx", *whole, "--out", onnx],
        ["encode", picture, *whole, "--out", floats, "--reader", "thread"],
        ["encode", picture, *rough, "--out", bits, "--reader", "thread"],
        ["encode", picture, *rough, "--encoder", onnx, "--keys-values", "--out", both, "--reader", "thread"],
    ):
        assert run(command).code == 0
    for captioner, wanted in (
        (Captioner.load(bundle, precision="int8"), True),
        (Captioner.load(bundle, precision="int4"), None),
        (Captioner.load(bundle, precision="int4", operators="aten"), None),  # by torch
        (Captioner.load(rounded), None),
        (Captioner.load(rounded, encoder=onnx), True),  # exported in floats
        (Captioner.load(decoder=decoder, model=rounded), None),
        (Captioner.load(decoder=decoder, model=bundle), True),
        (Captioner.load(decoder=decoder, encoder=onnx), True),
    ):
        with captioner:
            assert captioner.generate([image])[0].unfamiliar is wanted
    for model_path, decoder_path, prefixes, wanted in (
        (bundle, None, floats, True),
        (bundle, None, bits, None),
        (rounded, None, floats, True),
        (rounded, None, bits, None),
        (rounded, None, both, True),  # an exported encoder, and keys and values of a rounded decoder
        (None, decoder, floats, True),
        (None, decoder, bits, None),
    ):
        with Captioner.load(model_path, decoder=decoder_path, vision="prefixes", encoder=prefixes) as captioner:
            assert captioner.generate(prefixes)[0].unfamiliar is wanted, (model_path, prefixes)
