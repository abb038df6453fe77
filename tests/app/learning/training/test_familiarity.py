"""Pictures like the training pictures pass, and clearly different ones are marked, with few pictures too."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llama_adapter.app.learning.training.familiarity import fit_familiarity
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.vision.out_of_distribution import Floats
from scripts.train_embedded.familiar import FRESH, draw_own, encoder_of
from tests.app.golden import GOLDEN

# B pictures, Q visual queries, D their width

QUERIES, WIDTH = 4, 64


def drawn(seed: int, count: int, *, spread: float = 1.0) -> Floats:
    """Gaussian visual queries with variances that fall steeply; `spread` scales the directions of small variance."""
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((QUERIES, WIDTH, WIDTH)))[0]
    deviations_D = np.exp(-np.arange(WIDTH) / 8)
    deviations_D[16:] *= spread
    along = np.random.default_rng(seed).standard_normal((count, QUERIES, WIDTH)) * deviations_D
    return (1 + np.einsum("bqk,qdk->bqd", along, basis)).astype(np.float32)


@pytest.mark.parametrize(("num_train", "num_held_out"), [(20, 0), (54, 6), (200, 0), (100, 60)])
def test_few_new_pictures_are_marked_and_nearly_all_different_ones(num_train: int, num_held_out: int) -> None:
    shares, others = [], []
    for seed in range(8):
        fitted = fit_familiarity(drawn(10 + seed, num_train), drawn(50 + seed, num_held_out))
        shares.append(np.mean(fitted.unfamiliar(drawn(1, 400))))
        others.append(np.mean(fitted.unfamiliar(drawn(2, 100, spread=6.0))))

    # The expected share is at most 1 / (B + 1), or 2 %; that of a run varies like a beta distribution, with a standard
    # deviation of the same size for few pictures. The mean of 8 runs is within 3 of its standard deviations.
    expected = max(0.02, 1 / (num_train + num_held_out + 1))
    assert np.mean(shares) < expected * (1 + 3 / 8**0.5)
    assert np.mean(others) > 0.9


def test_held_out_pictures_decide_if_the_training_pictures_are_nearer() -> None:
    train, new = 1 + 0.5 * (drawn(3, 100) - 1), drawn(4, 400)
    for num_held_out in (10, 60):
        fitted = fit_familiarity(train, drawn(5, num_held_out))
        assert np.mean(fitted.unfamiliar(new)) < 0.25
    alone = fit_familiarity(train, new[:0])
    assert np.mean(alone.unfamiliar(new)) > 0.9


def test_too_few_or_equal_pictures_give_no_detector() -> None:
    assert fit_familiarity(drawn(1, 10), drawn(2, 9)) is None
    assert fit_familiarity(np.ones((50, QUERIES, WIDTH), dtype=np.float32), drawn(1, 0)) is None
    assert fit_familiarity(np.full((50, QUERIES, WIDTH), np.nan, dtype=np.float32), drawn(1, 19)) is None


def test_a_query_that_does_not_vary_is_no_obstacle() -> None:
    train = drawn(6, 40)
    train[:, 1] = 2.0
    fitted = fit_familiarity(train, train[:0])
    new = drawn(7, 200)
    new[:, 1] = 2.0
    assert np.mean(fitted.unfamiliar(new)) < 0.1


@pytest.mark.slow
def test_the_embedded_model_knows_pictures_like_its_32_samples() -> None:
    encode = encoder_of(Path(str(embedded_model())), precision="float")
    paths = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
    names = ("gradient_640x360.png", "gray_150x150.png", "noise_128x96.png", "shapes_200x300.jpg")
    samples, others = (
        encode([np.asarray(Image.open(path).convert("RGB").resize((224, 224))) for path in each])
        for each in (paths, [GOLDEN / "images" / name for name in names])
    )
    fitted = fit_familiarity(samples, samples[:0])

    assert np.mean(fitted.unfamiliar(encode(draw_own(use=FRESH, count=40)))) <= 0.1
    assert fitted.unfamiliar(others) == [True] * len(names)
