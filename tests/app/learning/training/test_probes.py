"""Probes: area means, folds that keep copies together, and ridge regression, compared with plain computations."""

import numpy as np
import pytest

from llama_adapter.app.learning.training.yardstick import (
    _PENALTIES,
    grey_pixels,
    linear_classes,
    nearest_classes,
    ridge,
    standardised,
    stratified_folds,
)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (48, 96), (10, 7), (100, 37), (1, 1)])
def test_grey_pixels_are_means_of_equal_areas(height: int, width: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    repeated = picture.repeat(24, axis=0).repeat(24, axis=1).reshape(24, height, 24, width, 3)
    grey = repeated.mean(axis=(1, 3)) @ (0.299, 0.587, 0.114) / 255
    found = grey_pixels(picture)
    assert found.dtype == np.float32
    assert found == pytest.approx(grey.ravel(), abs=1e-6)


def test_folds_keep_copies_together_and_spread_each_class() -> None:
    labels = np.repeat([0, 1, 2], [40, 20, 1])
    pictures = [f"{label}-{place // 2}" for place, label in enumerate(labels)]
    folds = stratified_folds(labels, pictures, seed=0)
    assert all(len({fold for fold, name in zip(folds, pictures, strict=True) if name == one}) == 1 for one in pictures)
    assert [np.bincount(folds[labels == label], minlength=5).tolist() for label in (0, 1)] == [[8] * 5, [4] * 5]


def plain_ridge(vectors: np.ndarray, targets: np.ndarray, held: np.ndarray, penalty: float) -> np.ndarray:
    mean, middle = vectors.mean(axis=0), targets.mean(axis=0)
    centred = vectors - mean
    matrix = centred.T @ centred + penalty * np.eye(vectors.shape[1])
    return middle + (held - mean) @ np.linalg.solve(matrix, centred.T @ (targets - middle))


@pytest.mark.parametrize(("count", "size"), [(20, 5), (12, 40), (12, 12)])
@pytest.mark.parametrize("noise", [0.1, 10.0])
def test_ridge_regression_takes_the_penalty_of_the_smallest_leave_one_out_error(
    count: int, size: int, noise: float
) -> None:
    random = np.random.default_rng(1)
    vectors, held = random.normal(size=(count, size)), random.normal(size=(7, size))
    targets = vectors @ random.normal(size=(size, 3)) + noise * random.normal(size=(count, 3))
    values = np.linalg.svd(vectors - vectors.mean(axis=0), compute_uv=False) ** 2
    mean_variance = values.sum() / min(size, count - 1)

    def error(penalty: float) -> float:
        others = [np.arange(count) != place for place in range(count)]
        left_out = [plain_ridge(vectors[one], targets[one], vectors[~one], penalty)[0] for one in others]
        return float(((targets - left_out) ** 2).sum())

    best = min((mean_variance * factor for factor in _PENALTIES), key=error)
    assert ridge(vectors, targets, held) == pytest.approx(plain_ridge(vectors, targets, held, best), rel=1e-6, abs=1e-9)


def test_degenerate_vectors_give_the_most_frequent_class() -> None:
    labels, folds = np.array([0, 1, 1, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 2])
    equal = standardised(np.full((6, 3), 7.0))
    assert not equal.any()
    assert linear_classes(equal, labels, folds).tolist() == [1] * 6


def test_neighbours_are_in_other_folds_and_compared_by_angle_or_distance() -> None:
    vectors = np.array([[1.0, 0.0], [1.0, 0.1], [9.0, 0.0], [0.0, 1.0]])
    labels, folds = np.arange(4), np.array([0, 0, 1, 1])
    assert nearest_classes(vectors, labels, folds, by_angle=True).tolist() == [2, 2, 0, 1]
    assert nearest_classes(vectors, labels, folds, by_angle=False).tolist() == [3, 3, 0, 1]
